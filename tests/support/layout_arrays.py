"""A tiny model as arrays of every HF tensor, and how arrays are cut. Shapes: h hidden."""

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
    expert in each slot of an engine with redundant experts; ``layer_experts`` the same where single
    layers differ, as (layer, slots).
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
    physical_experts: tuple[int, ...] = ()
    layer_experts: tuple[tuple[int, tuple[int, ...]], ...] = ()
    expert_multiple: int = 1
    transposed: bool = False
    whole_shared: bool = False
    flashcomm: bool = False

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


def padded(array: Array, multiple: int, axis: int = 0) -> Array:
    """Rows or columns of ``PADDING`` up to a multiple."""
    missing = -array.shape[axis] % multiple
    width = [(0, missing if dim == axis else 0) for dim in range(array.ndim)]
    return np.pad(array, width, constant_values=PADDING)


@dataclass(frozen=True)
class Cut:
    """Share ``index`` of ``count``."""

    index: int
    count: int

    def __call__(self, array: Array, axis: int = 0) -> Array:
        return np.split(array, self.count, axis=axis)[self.index]


@dataclass(frozen=True)
class Layer:
    """The tensors of one HF layer, by what follows its prefix."""

    hf: dict[str, Array]
    prefix: str

    def __getitem__(self, name: str) -> Array:
        return self.hf[self.prefix + name]
