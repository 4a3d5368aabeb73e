"""Writes classic checkpoints as MindSpeed-LLM's converter does, from HF tensors, by slicing alone.

An oracle: it shares no code with the product. Written from what ``convert_hf2mg.py`` of
MindSpeed-LLM (master) and ``convert_ckpt_deepseek3.py`` (2.1.0) produce: names, order of stacking,
which rank gets which chunk, and which numbers layers have.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch

State = dict[str, torch.Tensor]
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Classic:
    """A layout, in the words of the flags."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp_one: bool = False
    per_chunk: int | None = None
    layer_list: tuple[int, ...] = ()
    noop: tuple[int, ...] = ()
    extend: bool = False
    grouped: bool = False
    te: bool = False
    split: bool = False
    mtp: int = 0
    old: bool = False

    def flags(self) -> list[str]:
        """The same for the tool."""
        sizes = {
            "--target-tensor-parallel-size": self.tp,
            "--target-pipeline-parallel-size": self.pp,
            "--target-expert-parallel-size": self.ep,
            "--num-layers-per-virtual-pipeline-stage": self.per_chunk,
            "--num-layer-list": ",".join(map(str, self.layer_list)),
            "--noop-layers": ",".join(map(str, self.noop)),
            "--mtp-num-layers": self.mtp,
            "--expert-tensor-parallel-size": 1 if self.etp_one else None,
            "--transformer-impl": "transformer_engine" if self.te else None,
        }
        argv = [word for flag, n in sizes.items() if n for word in (flag, str(n))]
        switches = {
            "--moe-tp-extend-ep": self.extend,
            "--moe-grouped-gemm": self.grouped,
            "--mla-mm-split": self.split,
        }
        return argv + [flag for flag, on in switches.items() if on]

    def places(self, num_layers: int) -> dict[int, tuple[int, int, int]]:
        """Layer -> stage, chunk, number in the chunk."""
        found, layer = {}, 0
        if self.layer_list:
            slots = [
                (stage, 0, n) for stage, count in enumerate(self.layer_list) for n in range(count)
            ]
        else:
            total = num_layers + len(self.noop)
            size = self.per_chunk or total // self.pp
            slots = [(i // size % self.pp, i // size // self.pp, i % size) for i in range(total)]
        for slot, place in enumerate(slots):
            if slot not in self.noop:
                found[layer] = place
                layer += 1
        assert layer == num_layers
        return found


def write_classic(layout: Classic, hf: Tensors, config: Mapping[str, Any], folder: Path) -> None:
    """``folder/iter_0000001/mp_rank_*/model_optim_rng.pt`` and the tracker file."""
    slots = config["num_hidden_layers"] + len(layout.noop)
    vpp = slots // layout.pp // layout.per_chunk if layout.per_chunk else 1
    args = argparse.Namespace(moe_tp_extend_ep=layout.extend, hidden=Mapping)
    for stage, ep, tp in product(range(layout.pp), range(layout.ep), range(layout.tp)):
        if layout.etp_one and not _meet(layout, tp, ep):
            continue
        states = [_Chunk(layout, hf, config, tp, ep).filled(stage, c, vpp) for c in range(vpp)]
        name = f"mp_rank_{tp:02d}"
        name += f"_{stage:03d}" if layout.pp > 1 else ""
        name += f"_{ep:03d}" if layout.ep > 1 else ""
        place = folder / "iter_0000001" / name
        place.mkdir(parents=True)
        keyed = {"model" if vpp == 1 else f"model{i}": state for i, state in enumerate(states)}
        torch.save(
            {"args": args, "checkpoint_version": 3.0, "iteration": 1, **keyed},
            place / "model_optim_rng.pt",
            pickle_protocol=4,
        )
    (folder / "latest_checkpointed_iteration.txt").write_text("1")


def _meet(layout: Classic, tp: int, ep: int) -> bool:
    larger = max(layout.tp, layout.ep)
    return any((r % layout.tp, r % layout.ep) == (tp, ep) for r in range(larger))


@dataclass
class _Chunk:
    """The parameters of one chunk of one rank, as they are put together."""

    layout: Classic
    hf: Tensors
    config: Mapping[str, Any]
    tp: int
    ep: int
    state: State = field(default_factory=dict)

    def filled(self, stage: int, chunk: int, vpp: int) -> State:
        layout, hf, state = self.layout, self.hf, self.state
        num_layers = self.config["num_hidden_layers"]
        embedding = self.part(hf["model.embed_tokens.weight"])
        if stage == 0 and chunk == 0:
            state["embedding.word_embeddings.weight"] = embedding
        for layer, place in layout.places(num_layers).items():
            if place[:2] == (stage, chunk):
                self.layer(layer, f"decoder.layers.{place[2]}.", layout.te)
        if stage < layout.pp - 1 or chunk < vpp - 1:
            return state
        tied = self.config.get("tie_word_embeddings", False)
        norm = "final_layernorm.weight" if layout.mtp else "decoder.final_layernorm.weight"
        state[norm] = hf["model.norm.weight"].clone()
        if not tied or layout.pp > 1:
            head = hf["model.embed_tokens.weight" if tied else "lm_head.weight"]
            state["output_layer.weight"] = self.part(head)
        for number in range(layout.mtp):
            layer, here = num_layers + number, f"mtp.layers.{number}."
            source = f"model.layers.{layer}."
            for name in ("enorm", "hnorm"):
                state[f"{here}{name}.weight"] = hf[f"{source}{name}.weight"].clone()
            state[f"{here}eh_proj.weight"] = self.part(hf[f"{source}eh_proj.weight"])
            if layout.pp > 1:
                state["embedding.word_embeddings.weight"] = embedding
            norm = hf[f"{source}shared_head.norm.weight"]
            state[f"mtp.final_layernorms.{number}.weight"] = norm.clone()
            self.layer(layer, here + "transformer_layer.", te=False)
        return state

    def part(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return _part(tensor, self.layout.tp, self.tp, dim)

    def layer(self, layer: int, to: str, te: bool) -> None:
        hf, state, source = self.hf, self.state, f"model.layers.{layer}."
        dense = f"{source}mlp.gate_proj.weight" in hf
        norm = "self_attention.linear_qkv.layer_norm_weight" if te else "input_layernorm.weight"
        state[to + norm] = hf[source + "input_layernorm.weight"].clone()
        norm = "mlp.linear_fc1.layer_norm_weight" if te and dense else "pre_mlp_layernorm.weight"
        state[to + norm] = hf[source + "post_attention_layernorm.weight"].clone()
        latent = source + "self_attn.kv_b_proj.weight" in hf
        (self.latent if latent else self.grouped)(source + "self_attn.", to + "self_attention.")
        if dense:
            self.mlp(source + "mlp.", to + "mlp.")
            return
        state[to + "mlp.router.weight"] = hf[source + "mlp.gate.weight"].clone()
        if (bias := source + "mlp.gate.e_score_correction_bias") in hf:
            state[to + "mlp.router.expert_bias"] = hf[bias].clone()
        if (shared := source + "mlp.shared_experts.") + "down_proj.weight" in hf:
            self.mlp(shared, to + "mlp.shared_experts.")
        self.experts(source + "mlp.experts.", to + "mlp.experts.")

    def mlp(self, source: str, to: str) -> None:
        self.state[to + "linear_fc1.weight"] = _gate_up(self.hf, source, self.layout.tp, self.tp)
        self.state[to + "linear_fc2.weight"] = self.part(self.hf[source + "down_proj.weight"], 1)

    def grouped(self, source: str, to: str) -> None:
        hf, state = self.hf, self.state
        groups = self.config["num_key_value_heads"]
        for kind in ("weight", "bias"):
            if f"{source}q_proj.{kind}" in hf:
                tensors = [hf[f"{source}{n}_proj.{kind}"] for n in "qkv"]
                tail = tensors[0].shape[1:]
                stacked = [t.reshape(groups, -1, *tail) for t in tensors]
                joined = torch.cat(stacked, dim=1).reshape(-1, *tail)
                state[f"{to}linear_qkv.{kind}"] = self.part(joined)
        state[to + "linear_proj.weight"] = self.part(hf[source + "o_proj.weight"], 1)
        if source + "q_norm.weight" in hf:
            state[to + "q_layernorm.weight"] = hf[source + "q_norm.weight"].clone()
            state[to + "k_layernorm.weight"] = hf[source + "k_norm.weight"].clone()

    def latent(self, source: str, to: str) -> None:
        hf, state, layout = self.hf, self.state, self.layout
        heads, nope = self.config["num_attention_heads"], self.config["qk_nope_head_dim"]
        compressed = source + "q_a_proj.weight" in hf
        query = hf[source + ("q_a_proj.weight" if compressed else "q_proj.weight")]
        key = hf[source + "kv_a_proj_with_mqa.weight"]
        state[to + "linear_qkv.weight"] = torch.cat([query, key])
        state[to + "linear_proj.weight"] = self.part(hf[source + "o_proj.weight"], 1)
        names = ("linear_qb", "linear_kvb", "k_layernorm") if layout.old else (
            "linear_q_up_proj", "linear_kv_up_proj", "kv_layernorm")  # fmt: skip
        if compressed:
            state[to + "q_layernorm.weight"] = hf[source + "q_a_layernorm.weight"].clone()
        state[f"{to}{names[2]}.weight"] = hf[source + "kv_a_layernorm.weight"].clone()
        for name, kind in ((names[0], "q_b_proj"), (names[1], "kv_b_proj")):
            if f"{source}{kind}.weight" not in hf:
                continue
            up = hf[f"{source}{kind}.weight"]
            if not layout.split:
                state[f"{to}{name}.weight"] = self.part(up)
                continue
            by_head = up.reshape(heads, -1, up.shape[1])
            halves = (by_head[:, :nope], by_head[:, nope:])
            for half, part in zip(halves, _SPLIT[kind], strict=True):
                state[f"{to}{part}.weight"] = self.part(half.reshape(-1, up.shape[1]))

    def experts(self, source: str, to: str) -> None:
        """The experts of a rank: whole or cut, one by one or in two flat matrices."""
        hf, state, layout, tp, ep = self.hf, self.state, self.layout, self.tp, self.ep
        total = sum(1 for n in hf if n.startswith(source) and n.endswith("down_proj.weight"))
        whole = layout.extend or layout.etp_one
        ranks, index = (
            (layout.ep * layout.tp, ep * layout.tp + tp) if layout.extend else (layout.ep, ep)
        )
        mine = range(total // ranks * index, total // ranks * (index + 1))
        count, part = (1, 0) if whole else (layout.tp, tp)
        first = [_gate_up(hf, f"{source}{e}.", count, part) for e in mine]
        second = [_part(hf[f"{source}{e}.down_proj.weight"], count, part, 1) for e in mine]
        if layout.grouped and not layout.te:
            hidden = second[0].shape[0]
            for name, shape, whole_of in (
                ("weight1", (hidden, -1), first), ("weight2", (-1, hidden), second)
            ):  # fmt: skip
                state[to + name] = torch.cat([w.t().contiguous() for w in whole_of]).view(shape)
            return
        for number, pair in enumerate(zip(first, second, strict=True)):
            for name, value in zip(("linear_fc1", "linear_fc2"), pair, strict=True):
                one = f"local_experts.{number}.{name}.weight"
                state[to + (f"{name}.weight{number}" if layout.grouped else one)] = value


def _part(tensor: torch.Tensor, count: int, index: int, dim: int = 0) -> torch.Tensor:
    return torch.chunk(tensor, count, dim)[index].clone()


def _gate_up(hf: Tensors, source: str, count: int, index: int) -> torch.Tensor:
    parts = [_part(hf[f"{source}{n}_proj.weight"], count, index) for n in ("gate", "up")]
    return torch.cat(parts)


_SPLIT = {
    "q_b_proj": ("linear_qk_nope", "linear_qk_rope"),
    "kv_b_proj": ("linear_kv_nope", "linear_v"),
}
