"""Writes classic checkpoints as MindSpeed-LLM's converter does, from HF tensors, by slicing alone.

An oracle: it shares no code with the product. Written from what ``convert_hf2mg.py`` of
MindSpeed-LLM (master) and ``convert_ckpt_deepseek3.py`` (2.1.0) produce: names, order of stacking,
which rank gets which chunk, and which numbers layers have.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
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
    num_layers = config["num_hidden_layers"]
    slots = num_layers + len(layout.noop)
    vpp = slots // layout.pp // layout.per_chunk if layout.per_chunk else 1
    for stage in range(layout.pp):
        for ep in range(layout.ep):
            for tp in range(layout.tp):
                if layout.etp_one and not _meet(layout, tp, ep):
                    continue
                states = [_chunk(layout, hf, config, tp, stage, ep, c, vpp) for c in range(vpp)]
                name = f"mp_rank_{tp:02d}"
                name += f"_{stage:03d}" if layout.pp > 1 else ""
                name += f"_{ep:03d}" if layout.ep > 1 else ""
                place = folder / "iter_0000001" / name
                place.mkdir(parents=True)
                args = argparse.Namespace(moe_tp_extend_ep=layout.extend, hidden=Mapping)
                keyed = {"model": states[0]} if vpp == 1 else {
                    f"model{i}": state for i, state in enumerate(states)
                }  # fmt: skip
                torch.save(
                    {"args": args, "checkpoint_version": 3.0, "iteration": 1, **keyed},
                    place / "model_optim_rng.pt",
                    pickle_protocol=4,
                )
    (folder / "latest_checkpointed_iteration.txt").write_text("1")


def _meet(layout: Classic, tp: int, ep: int) -> bool:
    larger = max(layout.tp, layout.ep)
    return any((r % layout.tp, r % layout.ep) == (tp, ep) for r in range(larger))


def _chunk(
    layout: Classic,
    hf: Tensors,
    config: Mapping[str, Any],
    tp: int,
    stage: int,
    ep: int,
    chunk: int,
    vpp: int,
) -> State:
    state: State = {}
    last = stage == layout.pp - 1 and chunk == vpp - 1
    embedding = _part(hf["model.embed_tokens.weight"], layout.tp, tp)
    if stage == 0 and chunk == 0:
        state["embedding.word_embeddings.weight"] = embedding
    for layer, place in layout.places(config["num_hidden_layers"]).items():
        if place[:2] == (stage, chunk):
            prefix = f"decoder.layers.{place[2]}."
            _layer(layout, hf, config, layer, prefix, tp, ep, state)
    if not last:
        return state
    tied = config.get("tie_word_embeddings", False)
    norm = "final_layernorm.weight" if layout.mtp else "decoder.final_layernorm.weight"
    state[norm] = hf["model.norm.weight"].clone()
    if not tied or layout.pp > 1:
        head = hf["model.embed_tokens.weight" if tied else "lm_head.weight"]
        state["output_layer.weight"] = _part(head, layout.tp, tp)
    for number in range(layout.mtp):
        source, here = (
            f"model.layers.{config['num_hidden_layers'] + number}.",
            f"mtp.layers.{number}.",
        )
        for name in ("enorm", "hnorm"):
            state[f"{here}{name}.weight"] = hf[f"{source}{name}.weight"].clone()
        state[f"{here}eh_proj.weight"] = _part(hf[f"{source}eh_proj.weight"], layout.tp, tp)
        if layout.pp > 1:
            state["embedding.word_embeddings.weight"] = embedding
        state[f"mtp.final_layernorms.{number}.weight"] = hf[
            f"{source}shared_head.norm.weight"
        ].clone()
        layer = config["num_hidden_layers"] + number
        _layer(layout, hf, config, layer, here + "transformer_layer.", tp, ep, state, mtp=True)
    return state


def _part(tensor: torch.Tensor, count: int, index: int, dim: int = 0) -> torch.Tensor:
    return torch.chunk(tensor, count, dim)[index].clone()


def _layer(
    layout: Classic,
    hf: Tensors,
    config: Mapping[str, Any],
    layer: int,
    to: str,
    tp: int,
    ep: int,
    state: State,
    *,
    mtp: bool = False,
) -> None:
    source = f"model.layers.{layer}."
    dense = f"{source}mlp.gate_proj.weight" in hf
    te = layout.te and not mtp
    norm = "self_attention.linear_qkv.layer_norm_weight" if te else "input_layernorm.weight"
    state[to + norm] = hf[source + "input_layernorm.weight"].clone()
    norm = "mlp.linear_fc1.layer_norm_weight" if te and dense else "pre_mlp_layernorm.weight"
    state[to + norm] = hf[source + "post_attention_layernorm.weight"].clone()
    attention = _latent if source + "self_attn.kv_b_proj.weight" in hf else _grouped
    attention(layout, hf, config, source + "self_attn.", to + "self_attention.", tp, state)
    if dense:
        state[to + "mlp.linear_fc1.weight"] = _gate_up(hf, source + "mlp.", layout.tp, tp)
        down = hf[source + "mlp.down_proj.weight"]
        state[to + "mlp.linear_fc2.weight"] = _part(down, layout.tp, tp, 1)
        return
    state[to + "mlp.router.weight"] = hf[source + "mlp.gate.weight"].clone()
    if (bias := source + "mlp.gate.e_score_correction_bias") in hf:
        state[to + "mlp.router.expert_bias"] = hf[bias].clone()
    if (shared := source + "mlp.shared_experts.") + "down_proj.weight" in hf:
        state[to + "mlp.shared_experts.linear_fc1.weight"] = _gate_up(hf, shared, layout.tp, tp)
        down = hf[shared + "down_proj.weight"]
        state[to + "mlp.shared_experts.linear_fc2.weight"] = _part(down, layout.tp, tp, 1)
    _experts(layout, hf, source + "mlp.experts.", to + "mlp.experts.", tp, ep, state)


def _gate_up(hf: Tensors, source: str, count: int, index: int) -> torch.Tensor:
    parts = [_part(hf[f"{source}{n}_proj.weight"], count, index) for n in ("gate", "up")]
    return torch.cat(parts)


def _grouped(
    layout: Classic,
    hf: Tensors,
    config: Mapping[str, Any],
    source: str,
    to: str,
    tp: int,
    state: State,
) -> None:
    groups = config["num_key_value_heads"]

    def joined(kind: str) -> torch.Tensor:
        tensors = [hf[f"{source}{n}_proj.{kind}"] for n in "qkv"]
        tail = tensors[0].shape[1:]
        stacked = [t.reshape(groups, -1, *tail) for t in tensors]
        return _part(torch.cat(stacked, dim=1).reshape(-1, *tail), layout.tp, tp)

    state[to + "linear_qkv.weight"] = joined("weight")
    if source + "q_proj.bias" in hf:
        state[to + "linear_qkv.bias"] = joined("bias")
    state[to + "linear_proj.weight"] = _part(hf[source + "o_proj.weight"], layout.tp, tp, 1)
    if source + "q_norm.weight" in hf:
        state[to + "q_layernorm.weight"] = hf[source + "q_norm.weight"].clone()
        state[to + "k_layernorm.weight"] = hf[source + "k_norm.weight"].clone()


def _latent(
    layout: Classic,
    hf: Tensors,
    config: Mapping[str, Any],
    source: str,
    to: str,
    tp: int,
    state: State,
) -> None:
    heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]
    compressed = source + "q_a_proj.weight" in hf
    query = hf[source + ("q_a_proj.weight" if compressed else "q_proj.weight")]
    state[to + "linear_qkv.weight"] = torch.cat([query, hf[source + "kv_a_proj_with_mqa.weight"]])
    state[to + "linear_proj.weight"] = _part(hf[source + "o_proj.weight"], layout.tp, tp, 1)
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
            state[f"{to}{name}.weight"] = _part(up, layout.tp, tp)
            continue
        by_head = up.reshape(heads, -1, up.shape[1])
        halves = (by_head[:, :nope], by_head[:, nope:])
        for half, part in zip(halves, _SPLIT[kind], strict=True):
            state[f"{to}{part}.weight"] = _part(half.reshape(-1, up.shape[1]), layout.tp, tp)


_SPLIT = {
    "q_b_proj": ("linear_qk_nope", "linear_qk_rope"),
    "kv_b_proj": ("linear_kv_nope", "linear_v"),
}


def _experts(
    layout: Classic, hf: Tensors, source: str, to: str, tp: int, ep: int, state: State
) -> None:
    """The experts of a rank: whole or cut, one by one or in two flat matrices."""
    total = sum(1 for name in hf if name.startswith(source) and name.endswith("down_proj.weight"))
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
        state[to + "weight1"] = torch.cat([w.t().contiguous() for w in first]).view(hidden, -1)
        state[to + "weight2"] = torch.cat([w.t().contiguous() for w in second]).view(-1, hidden)
        return
    for number, (fc1, fc2) in enumerate(zip(first, second, strict=True)):
        if layout.grouped:
            state[f"{to}linear_fc1.weight{number}"] = fc1
            state[f"{to}linear_fc2.weight{number}"] = fc2
        else:
            state[f"{to}local_experts.{number}.linear_fc1.weight"] = fc1
            state[f"{to}local_experts.{number}.linear_fc2.weight"] = fc2
