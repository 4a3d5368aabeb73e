"""What every rank must hold, by slicing and concatenating whole arrays.

Written from megatron-core's and vLLM's own weight layouts and sharing no code with the planner:
an array of every HF tensor goes in, the parameters of one rank come out. Shapes: h hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int32]
PADDING = -1


@dataclass(frozen=True)
class Latent:
    """Sizes of latent attention; without a compressed query ``q_lora`` is 0."""

    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    v: int


@dataclass(frozen=True)
class Case:
    """A tiny model with a training grid and an engine size.

    The defaults are those of a dense model with biases, even stages and engines of one kind of
    parallelism. ``moe_layers`` says which layers have experts; ``noop`` lists empty slots among all
    layers, ``layer_list`` the layers of each chunk; ``etp`` 0 is ``tp``; ``physical_experts`` the
    expert in each slot of an engine with redundant experts.
    """

    num_layers: int
    hidden: int
    ffn: int
    kv_heads: int
    heads_per_group: int
    head_dim: int
    vocab: int
    tied: bool
    tp: int
    pp: int
    cp: int
    dp: int
    vocab_divisor: int
    engine_tp: int
    ranks_per_node: int
    qkv_bias: bool = True
    qk_norm: bool = False
    latent: Latent | None = None
    experts: int = 0
    expert_ffn: int = 0
    moe_layers: tuple[bool, ...] = ()
    shared_ffn: int = 0
    router_bias: bool = False
    vpp: int = 1
    noop: tuple[int, ...] = ()
    layer_list: tuple[int, ...] = ()
    ep: int = 1
    etp: int = 0
    engine_dp: int = 1
    engine_ep: bool = False
    engine_pp: int = 1
    physical_experts: tuple[int, ...] = ()
    expert_multiple: int = 1
    transposed: bool = False
    whole_shared: bool = False

    @property
    def world(self) -> int:
        """Ranks of the job."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.heads_per_group

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts instead of a dense MLP."""
        return bool(self.moe_layers) and self.moe_layers[layer]


def chunks_of(case: Case) -> list[list[int]]:
    """The layers of every chunk in the order of the model."""
    if case.layer_list:
        bounds = np.cumsum((0, *case.layer_list))
        return [list(range(lo, hi)) for lo, hi in pairwise(bounds.tolist())]
    layers = iter(range(case.num_layers))
    num_slots = case.num_layers + len(case.noop)
    slots = [None if slot in case.noop else next(layers) for slot in range(num_slots)]
    size = num_slots // (case.pp * case.vpp)
    parts = [slots[start : start + size] for start in range(0, num_slots, size)]
    return [[layer for layer in part if layer is not None] for part in parts]


def _attention_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    h, heads = case.hidden, case.heads
    if case.latent:
        c = case.latent
        query = heads * (c.nope + c.rope)
        compressed = {"q_a_proj.weight": (c.q_lora, h), "q_a_layernorm.weight": (c.q_lora,)}
        return {
            **(compressed if c.q_lora else {}),
            **({"q_b_proj.weight": (query, c.q_lora)} if c.q_lora else {}),
            **({} if c.q_lora else {"q_proj.weight": (query, h)}),
            "kv_a_proj_with_mqa.weight": (c.kv_lora + c.rope, h),
            "kv_a_layernorm.weight": (c.kv_lora,),
            "kv_b_proj.weight": (heads * (c.nope + c.v), c.kv_lora),
            "o_proj.weight": (h, heads * c.v),
        }
    q, kv = heads * case.head_dim, case.kv_heads * case.head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    for part, size in (("q", q), ("k", kv), ("v", kv)):
        shapes[f"{part}_proj.weight"] = (size, h)
        if case.qkv_bias:
            shapes[f"{part}_proj.bias"] = (size,)
    if case.qk_norm:
        shapes |= {"q_norm.weight": (case.head_dim,), "k_norm.weight": (case.head_dim,)}
    return shapes | {"o_proj.weight": (h, q)}


def _mlp_shapes(prefix: str, ffn: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (ffn, hidden),
        f"{prefix}up_proj.weight": (ffn, hidden),
        f"{prefix}down_proj.weight": (hidden, ffn),
    }


def _layer_shapes(case: Case, layer: int) -> dict[str, tuple[int, ...]]:
    h = case.hidden
    shapes = {"input_layernorm.weight": (h,), "post_attention_layernorm.weight": (h,)}
    shapes |= {f"self_attn.{name}": shape for name, shape in _attention_shapes(case).items()}
    if not case.has_experts(layer):
        return shapes | _mlp_shapes("mlp.", case.ffn, h)
    shapes["mlp.gate.weight"] = (case.experts, h)
    if case.router_bias:
        shapes["mlp.gate.e_score_correction_bias"] = (case.experts,)
    for expert in range(case.experts):
        shapes |= _mlp_shapes(f"mlp.experts.{expert}.", case.expert_ffn, h)
    if case.shared_ffn:
        shapes |= _mlp_shapes("mlp.shared_experts.", case.shared_ffn, h)
    return shapes


def hf_arrays(case: Case) -> dict[str, Array]:
    """Every HF tensor; each element of the model has a number of its own."""
    h = case.hidden
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (case.vocab, h)}
    for layer in range(case.num_layers):
        of_layer = _layer_shapes(case, layer)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    shapes["model.norm.weight"] = (h,)
    if not case.tied:
        shapes["lm_head.weight"] = (case.vocab, h)
    arrays, start = {}, 0
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        arrays[name] = np.arange(start, start + size, dtype=np.int32).reshape(shape)
        start += size
    return arrays


def _padded(array: Array, multiple: int, axis: int = 0) -> Array:
    """Rows or columns of ``PADDING`` up to a multiple."""
    missing = -array.shape[axis] % multiple
    width = [(0, missing if dim == axis else 0) for dim in range(array.ndim)]
    return np.pad(array, width, constant_values=PADDING)


@dataclass(frozen=True)
class _Cut:
    """Share ``index`` of ``count``."""

    index: int
    count: int

    def __call__(self, array: Array, axis: int = 0) -> Array:
        return np.split(array, self.count, axis=axis)[self.index]


@dataclass(frozen=True)
class _Layer:
    """The tensors of one HF layer, by what follows its prefix."""

    hf: dict[str, Array]
    prefix: str

    def __getitem__(self, name: str) -> Array:
        return self.hf[self.prefix + name]


# --- megatron-core -----------------------------------------------------------------------------


def _megatron_attention(case: Case, layer: _Layer, share: _Cut) -> dict[str, Array]:
    def attention(name: str) -> Array:
        return layer[f"self_attn.{name}"]

    if case.latent:
        params = {
            "linear_kv_down_proj.weight": attention("kv_a_proj_with_mqa.weight"),
            "kv_layernorm.weight": attention("kv_a_layernorm.weight"),
            "linear_kv_up_proj.weight": share(attention("kv_b_proj.weight")),
            "linear_proj.weight": share(attention("o_proj.weight"), 1),
        }
        if not case.latent.q_lora:
            return params | {"linear_q_proj.weight": share(attention("q_proj.weight"))}
        return params | {
            "linear_q_down_proj.weight": attention("q_a_proj.weight"),
            "q_layernorm.weight": attention("q_a_layernorm.weight"),
            "linear_q_up_proj.weight": share(attention("q_b_proj.weight")),
        }

    def qkv(kind: str) -> Array:
        parts = [attention(f"{p}_proj.{kind}") for p in "qkv"]
        tail = parts[0].shape[1:]
        groups = [part.reshape(case.kv_heads, -1, *tail) for part in parts]
        return share(np.concatenate(groups, axis=1).reshape(-1, *tail))

    params = {
        "linear_qkv.weight": qkv("weight"),
        "linear_proj.weight": share(attention("o_proj.weight"), 1),
    }
    if case.qkv_bias:
        params["linear_qkv.bias"] = qkv("bias")
    if case.qk_norm:
        params |= {f"{p}_layernorm.weight": attention(f"{p}_norm.weight") for p in "qk"}
    return params


def _megatron_mlp(layer: _Layer, prefix: str, share: _Cut) -> dict[str, Array]:
    gate, up = layer[prefix + "gate_proj.weight"], layer[prefix + "up_proj.weight"]
    return {
        "linear_fc1.weight": np.concatenate([share(gate), share(up)]),
        "linear_fc2.weight": share(layer[prefix + "down_proj.weight"], 1),
    }


def _megatron_experts(case: Case, layer: _Layer, rank: int) -> dict[str, Array]:
    params = {"router.weight": layer["mlp.gate.weight"]}
    if case.router_bias:
        params["router.expert_bias"] = layer["mlp.gate.e_score_correction_bias"]
    # expert tensor parallelism innermost, then expert parallelism
    etp = case.etp or case.tp
    share, mine = _Cut(rank % etp, etp), _Cut(rank // etp % case.ep, case.ep)
    for local, expert in enumerate(mine(np.arange(case.experts, dtype=np.int32)).tolist()):
        matrices = _megatron_mlp(layer, f"mlp.experts.{expert}.", share)
        params |= {f"experts.local_experts.{local}.{n}": array for n, array in matrices.items()}
    if case.shared_ffn:
        shared = _megatron_mlp(layer, "mlp.shared_experts.", _Cut(rank % case.tp, case.tp))
        params |= {f"shared_experts.{name}": array for name, array in shared.items()}
    return params


def megatron_params(case: Case, hf: dict[str, Array], rank: int) -> dict[str, Array]:
    """The parameters of a training rank: tensor parallelism innermost, pipeline outermost."""
    share, stage = _Cut(rank % case.tp, case.tp), rank // (case.world // case.pp)
    multiple = case.vocab_divisor * case.tp
    params: dict[str, Array] = {}
    for number, layers in enumerate(chunks := chunks_of(case)):
        if number % case.pp != stage:
            continue
        here = f"chunk{number // case.pp}." if case.vpp > 1 else ""
        if number == 0:
            embedding = share(_padded(hf["model.embed_tokens.weight"], multiple))
            params[here + "embedding.word_embeddings.weight"] = embedding
        for local, number_in_model in enumerate(layers):
            layer = _Layer(hf, f"model.layers.{number_in_model}.")
            ours = f"{here}decoder.layers.{local}."
            if case.has_experts(number_in_model):
                mlp = _megatron_experts(case, layer, rank)
            else:
                mlp = _megatron_mlp(layer, "mlp.", share)
            attention = _megatron_attention(case, layer, share)
            params |= {
                ours + "input_layernorm.weight": layer["input_layernorm.weight"],
                ours + "pre_mlp_layernorm.weight": layer["post_attention_layernorm.weight"],
                **{f"{ours}self_attention.{name}": array for name, array in attention.items()},
                **{f"{ours}mlp.{name}": array for name, array in mlp.items()},
            }
        if number == len(chunks) - 1:
            params[here + "decoder.final_layernorm.weight"] = hf["model.norm.weight"]
            if not case.tied or case.pp > 1:
                head = hf["model.embed_tokens.weight" if case.tied else "lm_head.weight"]
                params[here + "output_layer.weight"] = share(_padded(head, multiple))
    return params


# --- vLLM --------------------------------------------------------------------------------------


def _vllm_attention(case: Case, layer: _Layer, share: _Cut) -> dict[str, Array]:
    def attention(name: str) -> Array:
        return layer[f"self_attn.{name}"]

    if case.latent:
        down, query = attention("kv_a_proj_with_mqa.weight"), {}
        if case.latent.q_lora:
            joint = np.concatenate([attention("q_a_proj.weight"), down])
            query = {
                "fused_qkv_a_proj.weight": joint,
                "q_a_layernorm.weight": attention("q_a_layernorm.weight"),
                "q_b_proj.weight": share(attention("q_b_proj.weight")),
            }
        else:
            query = {
                "kv_a_proj_with_mqa.weight": down,
                "q_proj.weight": share(attention("q_proj.weight")),
            }
        return query | {
            "kv_a_layernorm.weight": attention("kv_a_layernorm.weight"),
            "kv_b_proj.weight": share(attention("kv_b_proj.weight")),
            "o_proj.weight": share(attention("o_proj.weight"), 1),
        }

    def kv_share(array: Array) -> Array:
        heads = np.stack(np.split(array, case.kv_heads))
        copies = np.repeat(heads, max(1, share.count // case.kv_heads), axis=0)
        return np.concatenate(list(share(copies)))

    def qkv(kind: str) -> Array:
        q, k, v = (attention(f"{p}_proj.{kind}") for p in "qkv")
        return np.concatenate([share(q), kv_share(k), kv_share(v)])

    params = {
        "qkv_proj.weight": qkv("weight"),
        "o_proj.weight": share(attention("o_proj.weight"), 1),
    }
    if case.qkv_bias:
        params["qkv_proj.bias"] = qkv("bias")
    if case.qk_norm:
        params |= {f"{p}_norm.weight": attention(f"{p}_norm.weight") for p in "qk"}
    return params


def _vllm_mlp(layer: _Layer, prefix: str, share: _Cut) -> dict[str, Array]:
    gate, up = layer[prefix + "gate_proj.weight"], layer[prefix + "up_proj.weight"]
    return {
        "gate_up_proj.weight": np.concatenate([share(gate), share(up)]),
        "down_proj.weight": share(layer[prefix + "down_proj.weight"], 1),
    }


def _vllm_experts(case: Case, layer: _Layer, rank: int) -> dict[str, Array]:
    """Experts over all ranks of the engine: whole ones, or slices of all of them, padded."""
    params = {"gate.weight": layer["mlp.gate.weight"]}
    if case.router_bias:
        params["gate.e_score_correction_bias"] = layer["mlp.gate.e_score_correction_bias"]
    dp_rank = rank // (case.engine_tp * case.engine_pp) % case.engine_dp
    mine = _Cut(dp_rank * case.engine_tp + rank % case.engine_tp, case.engine_tp * case.engine_dp)
    experts = np.array(case.physical_experts or range(case.experts), dtype=np.int32)
    share = _Cut(0, 1) if case.engine_ep else mine
    w13, w2 = [], []
    for expert in (mine(experts) if case.engine_ep else experts).tolist():
        gate, up, down = (
            layer[f"mlp.experts.{expert}.{p}_proj.weight"] for p in ("gate", "up", "down")
        )
        halves = [_padded(share(half), case.expert_multiple) for half in (gate, up)]
        w13.append(np.concatenate(halves))
        w2.append(_padded(share(down, 1), case.expert_multiple, axis=1))
    for name, stack in (("w13_weight", np.stack(w13)), ("w2_weight", np.stack(w2))):
        stored = np.ascontiguousarray(stack.transpose(0, 2, 1)) if case.transposed else stack
        params[f"experts.routed_experts.{name}"] = stored
    if case.shared_ffn:
        spread = case.engine_ep and case.engine_tp > 1 and case.engine_dp > 1
        count = 1 if case.whole_shared and spread else case.engine_tp
        shared = _vllm_mlp(layer, "mlp.shared_experts.", _Cut(rank % count, count))
        params |= {f"shared_experts.{name}": array for name, array in shared.items()}
    return params


def vllm_params(case: Case, hf: dict[str, Array], rank: int) -> dict[str, Array]:
    """The parameters of a vLLM rank: engines are runs of neighbouring ranks."""
    share = _Cut(rank % case.engine_tp, case.engine_tp)
    stage, last = rank // case.engine_tp % case.engine_pp, case.engine_pp - 1
    # what does not divide goes to the stages before the last
    counts = [case.num_layers // case.engine_pp] * case.engine_pp
    for extra in range(case.num_layers % case.engine_pp):
        counts[-2 - extra] += 1
    params = {}
    if stage == 0 or (case.tied and stage == last):
        embedding = share(_padded(hf["model.embed_tokens.weight"], 64))
        params["model.embed_tokens.weight"] = embedding
    for number in range(sum(counts[:stage]), sum(counts[: stage + 1])):
        name = f"model.layers.{number}."
        layer = _Layer(hf, name)
        if case.has_experts(number):
            mlp = _vllm_experts(case, layer, rank)
        else:
            mlp = _vllm_mlp(layer, "mlp.", share)
        attention = _vllm_attention(case, layer, share)
        params |= {
            name + "input_layernorm.weight": layer["input_layernorm.weight"],
            name + "post_attention_layernorm.weight": layer["post_attention_layernorm.weight"],
            **{f"{name}self_attn.{n}": array for n, array in attention.items()},
            **{f"{name}mlp.{n}": array for n, array in mlp.items()},
        }
    if stage == last:
        params["model.norm.weight"] = hf["model.norm.weight"]
    if stage == last and not case.tied:
        params["lm_head.weight"] = share(_padded(hf["lm_head.weight"], 64))
    return params
