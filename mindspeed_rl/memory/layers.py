"""What the layers of a model keep for the backward pass, operator by operator.

Two sets of kernels. ``EAGER`` is plain PyTorch, which is what runs on CPU: every operator keeps its
inputs (norms in fp32, both halves of the gated activation, copies of queries and keys in attention
batches). ``FUSED`` is what accelerators run: flash attention, fused norm, rotation and gated
activation, which keep inputs and row statistics alone.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from mindspeed_rl.memory.tape import Step, recomputed
from mindspeed_rl.models.spec import ModelSpec

_FP32, _INT64 = 4, 8


class Kernels(enum.StrEnum):
    """Which operators run."""

    EAGER = "eager"
    FUSED = "fused"


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Everything that the memory of a layer follows from.

    Attributes:
        spec: the model.
        kernels: which operators run.
        tokens: of a micro-batch on a context-parallel rank.
        sequence: tokens of its longest sequence.
        tp: tensor-parallel size.
        etp: expert-tensor-parallel size.
        ep: expert-parallel size.
        shards_sequence: whether sequence parallelism is on.
        item: bytes of an element.
        imbalance: tokens that the busiest expert-parallel rank gets, by the mean.
        recompute_modules: parts that are recomputed by themselves.
    """

    spec: ModelSpec
    kernels: Kernels
    tokens: int
    sequence: int
    tp: int
    etp: int
    ep: int
    shards_sequence: bool
    item: int
    imbalance: float
    recompute_modules: tuple[str, ...]

    @property
    def local_tokens(self) -> int:
        """Tokens of the residual stream on this rank."""
        return self.tokens // self.tp if self.shards_sequence else self.tokens

    @property
    def residual(self) -> int:
        """Bytes of the residual stream."""
        return self.local_tokens * self.spec.hidden_size * self.item

    @property
    def gathered(self) -> int:
        """Bytes of the input of a projection that all tensor-parallel ranks need whole."""
        return self.tokens * self.spec.hidden_size * self.item

    @property
    def gathering(self) -> int:
        """Besides the residual stream: its gathered copy, where sequence parallelism is on."""
        return self.gathered if self.shards_sequence else 0

    @property
    def fused(self) -> bool:
        """Whether fused kernels run."""
        return self.kernels is Kernels.FUSED


def layer_tape(sizes: LayerSizes, layer: int) -> list[Step]:
    """The steps of one transformer layer, in the order of its forward pass."""
    attention = _latent_attention(sizes) if sizes.spec.latent else _attention(sizes)
    mlp = _moe(sizes) if sizes.spec.has_experts(layer) else [*_input(sizes), *_dense_mlp(sizes)]
    name = "moe" if sizes.spec.has_experts(layer) else "mlp"
    if name in sizes.recompute_modules:
        left = left_by_dispatcher(sizes) if name == "moe" else 0
        mlp = [recomputed(name, mlp, sizes.residual, sizes.residual, left)]
    return [_norm(sizes), *attention, _norm(sizes), *mlp]


def left_by_dispatcher(sizes: LayerSizes) -> int:
    """What a recomputed part with experts leaves: its input and the gradient of it.

    The token dispatcher remembers the routing probabilities of its last micro-batch; they hold the
    graph of the second forward pass, and that its leaf.
    """
    return 2 * sizes.residual


def _norm(s: LayerSizes) -> Step:
    """RMSNorm over the residual stream; its output belongs to the projection behind it."""
    elements = s.local_tokens * s.spec.hidden_size
    return _norm_of(s, elements, s.local_tokens, input_kept=True)


def _norm_of(s: LayerSizes, elements: int, rows: int, input_kept: bool) -> Step:
    stats = rows * _FP32
    if s.fused:
        kept = (elements * s.item if input_kept else 0) + stats
        return Step("norm", kept, elements * s.item, s.residual + elements * s.item)
    kept = (elements * _FP32 if input_kept else 0) + stats + elements * _FP32
    return Step("norm", kept, elements * _FP32, s.residual + 3 * elements * _FP32)


def _input(s: LayerSizes) -> list[Step]:
    """The output of a norm, which the projections behind it keep."""
    return [Step("projection input", s.residual, s.gathering, s.residual + s.gathering)]


def _linear(s: LayerSizes, rows: int, columns: int, tokens: int) -> int:
    """Gradients around the backward pass of a projection: out, in and weight."""
    return s.item * (tokens * (rows + columns) + rows * columns)


def _attention(s: LayerSizes) -> list[Step]:
    spec, item = s.spec, s.item
    heads, groups = spec.num_heads // s.tp, max(1, spec.num_kv_heads // s.tp)
    query, key = heads * spec.head_dim, groups * spec.head_dim
    mixed = s.tokens * (query + 2 * key) * item
    steps = _input(s)
    steps[0] = Step(
        "projection input",
        s.residual,
        s.gathering + mixed,
        s.residual + s.gathering + _linear(s, query + 2 * key, spec.hidden_size, s.tokens),
    )
    if spec.qk_norm:
        steps += _head_norms(s, query, key, heads + groups)
    out, stats = s.tokens * query * item, s.tokens * heads * _FP32
    rotated = s.tokens * (query + key) * item
    selective = "core_attn" in s.recompute_modules
    # values are a slice of the fused projection, which norms of heads keep already in fp32
    whole = 0 if spec.qk_norm and item == _FP32 and not s.fused else mixed
    if selective:
        core = Step("core attention", mixed if s.fused else rotated + whole, mixed)
    else:
        core = Step("attention batches", mixed, mixed, s.residual + 2 * mixed)
    again = mixed + stats + 2 * out
    copies = 0 if s.fused or selective else out
    return [
        *steps,
        *_rotation(s, spec.head_dim),
        core,
        Step(
            "attention",
            copies + (0 if selective else stats),
            out,
            s.residual + 2 * mixed + out + (again if selective else 0),
        ),
        Step(
            "attention output",
            out,
            s.gathered,
            s.residual + s.gathering + _linear(s, spec.hidden_size, query, s.tokens),
        ),
    ]


def _head_norms(s: LayerSizes, query: int, key: int, heads: int) -> list[Step]:
    elements, rows = s.tokens * (query + key), s.tokens * heads
    if s.fused:
        return [Step("head norms", elements * s.item + rows * _FP32, elements * s.item)]
    kept = rows * _FP32 + elements * _FP32
    if s.item == _FP32:  # queries are copied; keys are a slice of the fused projection
        kept += s.tokens * (query + query + 2 * key) * _FP32
    else:
        kept += elements * _FP32
    return [Step("head norms", kept, elements * s.item, s.residual + 3 * elements * _FP32)]


def _rotation(s: LayerSizes, channels: int) -> list[Step]:
    """Cosine and sine for queries and for keys, in the precision of training."""
    if s.fused:
        return [Step("rotation", 0, 2 * s.tokens * channels * s.item)]
    return [Step("rotation", 4 * s.tokens * channels * s.item)]


def _latent_attention(s: LayerSizes) -> list[Step]:
    spec, item, latent = s.spec, s.item, s.spec.latent
    assert latent is not None
    heads = spec.num_heads // s.tp
    wide = heads * (latent.nope_head_dim + latent.rope_head_dim)
    value = heads * latent.v_head_dim
    up = heads * (latent.nope_head_dim + latent.v_head_dim)
    tokens, local = s.tokens, s.local_tokens
    hidden = spec.hidden_size
    down = latent.q_lora_rank + spec.kv_a_size
    steps = [
        Step(
            "projection input",
            s.residual,
            local * down * item,
            s.residual + _linear(s, down, hidden, local),
        )
    ]
    ranks = [rank for rank in (latent.q_lora_rank, latent.kv_lora_rank) if rank]
    for rank in ranks:
        norm = _norm_of(s, local * rank, local, input_kept=True)
        steps.append(Step("latent norm", norm.kept + local * rank * item, norm.forward))
    qkv = tokens * (2 * wide + value) * item
    gathered = tokens * (down + up) * item
    out = tokens * value * item
    if s.fused:
        core = qkv + tokens * heads * _FP32
        scratch = core_grad = qkv
    else:
        # unequal head sizes: scores are whole, in fp32
        scores = heads * tokens * s.sequence * _FP32
        core = tokens * (2 * wide + value) * _FP32 + scores
        scratch, core_grad = scores + qkv, core + scores
    kept, again = core, 0
    if "core_attn" in s.recompute_modules:
        kept, again = qkv + tokens * up * item, core
    return [
        *steps,
        *_rotation(s, latent.rope_head_dim),
        Step(
            "latent projections",
            0,
            gathered + qkv,
            s.residual + gathered + qkv + _linear(s, up + wide, sum(ranks), 0),
        ),
        Step("attention", kept, scratch, s.residual + core_grad + again),
        Step(
            "attention output",
            out,
            s.gathered,
            s.residual + s.gathering + _linear(s, hidden, value, tokens),
        ),
    ]


def _gated(s: LayerSizes, name: str, tokens: int, width: int, others: int) -> list[Step]:
    """Gate and up projection, activation, down projection.

    Args:
        s: sizes.
        name: prefix.
        tokens: that pass through it on this rank.
        width: its intermediate size on this rank.
        others: gradients that wait meanwhile.
    """
    one = tokens * width * s.item
    hidden = s.spec.hidden_size
    weight = width * hidden * s.item
    halves = 2 * one if s.fused else 4 * one  # eager: both halves, the activated and the shifted
    io = tokens * hidden * s.item
    return [
        Step(f"{name} up", 0, 2 * one, others + 2 * one + io + 2 * weight),
        Step(f"{name} gate", halves, one, others + 3 * one),
        Step(f"{name} down", one, io, others + io + one + weight),
    ]


def _dense_mlp(s: LayerSizes) -> list[Step]:
    return _gated(s, "mlp", s.tokens, s.spec.ffn_hidden_size // s.tp, s.residual)


def _moe(s: LayerSizes) -> list[Step]:
    """Router, dispatch, experts, combine, shared experts (megatron-core's all-to-all dispatcher).

    A rank sends ``top_k`` copies of each of its tokens and gets as many back on average, times the
    imbalance where ranks differ in experts.
    """
    moe, hidden, item = s.spec.moe, s.spec.hidden_size, s.item
    assert moe is not None
    tokens = s.local_tokens
    sent = tokens * moe.top_k
    taken = int(sent * s.etp * (s.imbalance if s.ep > 1 else 1.0))
    width = moe.ffn_hidden_size // s.etp
    out, back = sent * hidden * item, taken * hidden * item
    # scores, choice, map and probabilities by expert, order of the copies
    routing = tokens * moe.num_experts * (2 * _FP32 + 2) + sent * (2 * _INT64 + 2 * _FP32)
    one = taken * width * item
    # eager experts also keep the weighted activation apart from the plain one
    inner = 3 * one if s.fused else 6 * one
    waiting = 2 * s.residual
    steps = [
        Step("moe input", s.residual, 0, waiting),
        Step("router", routing, tokens * moe.num_experts * _FP32, waiting + 2 * routing),
    ]
    if moe.shared_ffn_hidden_size:
        shared = moe.shared_ffn_hidden_size // s.tp
        steps += _gated(s, "shared experts", s.tokens, shared, waiting + s.gathering)
    exchange = back + (out if s.ep > 1 else 0)
    steps += [
        Step("dispatch", back, exchange, waiting + exchange + back),
        Step("experts", inner, back, waiting + 2 * back + 3 * one + 3 * width * hidden * item),
        Step("combine", 0, exchange + s.residual, waiting + exchange),
    ]
    return steps
