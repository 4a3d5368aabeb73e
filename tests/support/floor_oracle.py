"""Which elements every rank holds in training and needs in vLLM, and what it must receive at least.

A second opinion on layouts and planner: written from the published configs and from the
documentation of megatron-core, MindSpeed and vLLM, sharing no code with ``mindspeed_rl``. Elements
are sets of rectangles (row interval x column interval) of Hugging Face tensors in checkpoint
orientation ``[out, in]``; vectors have one column. How a rank orders or fuses them is of no
interest here: :mod:`support.layout_oracle` states that for shapes small enough to be arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

BF16_BYTES, FP32_BYTES = 2, 4
MEGATRON_VOCAB_DIVISOR, VLLM_VOCAB_MULTIPLE = 128, 64

Config = Mapping[str, Any]


class Rect(NamedTuple):
    """Rows ``[row, row_end)`` and columns ``[col, col_end)``."""

    row: int
    row_end: int
    col: int
    col_end: int


Elements = dict[str, tuple[Rect, ...]]


@dataclass(frozen=True)
class Training:
    """A Megatron layout. ``etp`` 0 is ``tp``; ``extend_ep`` is MindSpeed's ``moe-tp-extend-ep``.

    ``layers`` lists the layers of every chunk in the order of the model; empty: an even split.
    """

    world: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 0
    extend_ep: bool = False
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Rollout:
    """vLLM engines of ``dp x pp x tp`` neighbouring ranks, ``tp`` innermost.

    ``ep`` is 1 or ``tp x dp``. ``slots`` is the physical expert map of redundant experts: the
    logical expert of every slot of an engine; empty: each expert once, in order.
    """

    world: int
    tp: int = 1
    dp: int = 1
    ep: int = 1
    pp: int = 1
    slots: tuple[int, ...] = ()


# --- sets of elements --------------------------------------------------------------------------


@lru_cache(maxsize=1 << 16)
def _missing(wanted: tuple[Rect, ...], present: tuple[Rect, ...]) -> int:
    """Elements in the union of ``wanted`` and not in that of ``present``.

    The edges of all rectangles cut the plane into cells; each cell is inside a rectangle or not.
    """
    rects = wanted + present
    rows = sorted({edge for r in rects for edge in (r.row, r.row_end)})
    cols = sorted({edge for r in rects for edge in (r.col, r.col_end)})

    def covered(by: tuple[Rect, ...], row: int, col: int) -> bool:
        return any(r.row <= row < r.row_end and r.col <= col < r.col_end for r in by)

    return sum(
        (row_end - row) * (col_end - col)
        for row, row_end in pairwise(rows)
        for col, col_end in pairwise(cols)
        if covered(wanted, row, col) and not covered(present, row, col)
    )


def bytes_missing(wanted: Elements, present: Elements) -> int:
    """Bytes of the elements in ``wanted`` that are not in ``present``, each counted once."""
    return sum(
        _missing(rects, present.get(name, ())) * element_bytes(name)
        for name, rects in wanted.items()
    )


def differing(one: Elements, other: Elements) -> list[str]:
    """The tensors of which two sets hold different elements."""
    return [
        name
        for name in sorted({*one, *other})
        if _missing(one.get(name, ()), other.get(name, ()))
        or _missing(other.get(name, ()), one.get(name, ()))
    ]


def union(sets: Iterable[Elements]) -> Elements:
    """All elements of several ranks."""
    together: dict[str, set[Rect]] = {}
    for elements in sets:
        for name, rects in elements.items():
            together.setdefault(name, set()).update(rects)
    return {name: tuple(sorted(rects)) for name, rects in together.items()}


def element_bytes(name: str) -> int:
    """Weights are bfloat16; the bias of DeepSeek's router is kept in float32."""
    return FP32_BYTES if name.endswith("e_score_correction_bias") else BF16_BYTES


# --- how a tensor is cut -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Share:
    """Part ``index`` of ``count``; sizes are those of the whole tensor."""

    index: int = 0
    count: int = 1

    def rows(self, rows: int, cols: int = 1) -> tuple[Rect, ...]:
        """An even share of the rows, all columns."""
        lo, hi = self._interval(rows)
        return (Rect(lo, hi, 0, cols),)

    def cols(self, rows: int, cols: int) -> tuple[Rect, ...]:
        """All rows, an even share of the columns."""
        lo, hi = self._interval(cols)
        return (Rect(0, rows, lo, hi),)

    def _interval(self, size: int) -> tuple[int, int]:
        assert size % self.count == 0, f"{size} over {self.count} ranks"
        return self.index * size // self.count, (self.index + 1) * size // self.count

    def vocabulary(self, rows: int, cols: int, multiple: int) -> tuple[Rect, ...]:
        """An even share of the padded rows, as far as they are real."""
        padded = -(-rows // multiple) * multiple
        lo, hi = self._interval(padded)
        return (Rect(lo, min(hi, rows), 0, cols),) if lo < rows else ()

    def key_value_rows(self, heads: int, head_dim: int, cols: int = 1) -> tuple[Rect, ...]:
        """Whole heads; with more ranks than heads, neighbouring ranks hold the same one."""
        if self.count <= heads:
            return self.rows(heads * head_dim, cols)
        head = self.index * heads // self.count
        return (Rect(head * head_dim, (head + 1) * head_dim, 0, cols),)


_WHOLE = _Share()


# --- the tensors of one layer ------------------------------------------------------------------


def _is_latent(config: Config) -> bool:
    return "kv_lora_rank" in config


def _num_experts(config: Config) -> int:
    return int(config.get("n_routed_experts") or config.get("num_experts") or 0)


def _has_experts(config: Config, layer: int) -> bool:
    if _is_latent(config):
        return layer >= int(config["first_k_dense_replace"])
    return _num_experts(config) > 0


def _latent_attention(config: Config, share: _Share) -> Elements:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    value = config["v_head_dim"]
    return {
        "q_a_proj.weight": _WHOLE.rows(q_rank, hidden),
        "q_a_layernorm.weight": _WHOLE.rows(q_rank),
        "q_b_proj.weight": share.rows(heads * (nope + rope), q_rank),
        "kv_a_proj_with_mqa.weight": _WHOLE.rows(kv_rank + rope, hidden),
        "kv_a_layernorm.weight": _WHOLE.rows(kv_rank),
        "kv_b_proj.weight": share.rows(heads * (nope + value), kv_rank),
        "o_proj.weight": share.cols(hidden, heads * value),
    }


def _grouped_attention(config: Config, share: _Share) -> Elements:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    elements = {
        "q_proj.weight": share.rows(heads * head_dim, hidden),
        "k_proj.weight": share.key_value_rows(kv_heads, head_dim, hidden),
        "v_proj.weight": share.key_value_rows(kv_heads, head_dim, hidden),
        "o_proj.weight": share.cols(hidden, heads * head_dim),
    }
    if config["model_type"] == "qwen2":
        elements["q_proj.bias"] = share.rows(heads * head_dim)
        elements["k_proj.bias"] = share.key_value_rows(kv_heads, head_dim)
        elements["v_proj.bias"] = share.key_value_rows(kv_heads, head_dim)
    if config["model_type"] in ("qwen3", "qwen3_moe"):
        elements["q_norm.weight"] = _WHOLE.rows(head_dim)
        elements["k_norm.weight"] = _WHOLE.rows(head_dim)
    return elements


def _gated_mlp(hidden: int, intermediate: int, share: _Share) -> Elements:
    return {
        "gate_proj.weight": share.rows(intermediate, hidden),
        "up_proj.weight": share.rows(intermediate, hidden),
        "down_proj.weight": share.cols(hidden, intermediate),
    }


def _prefixed(prefix: str, elements: Elements) -> Elements:
    return {prefix + name: rects for name, rects in elements.items()}


def _layer(
    config: Config, layer: int, share: _Share, experts: Iterable[int], expert_share: _Share
) -> Elements:
    """One layer of a rank that cuts dense tensors by ``share`` and keeps some of the experts."""
    hidden = config["hidden_size"]
    attention = _latent_attention if _is_latent(config) else _grouped_attention
    elements = {
        "input_layernorm.weight": _WHOLE.rows(hidden),
        "post_attention_layernorm.weight": _WHOLE.rows(hidden),
        **_prefixed("self_attn.", attention(config, share)),
    }
    if not _has_experts(config, layer):
        mlp = _gated_mlp(hidden, config["intermediate_size"], share)
        return elements | _prefixed("mlp.", mlp)
    size = config["moe_intermediate_size"]
    elements["mlp.gate.weight"] = _WHOLE.rows(_num_experts(config), hidden)
    if _is_latent(config):
        elements["mlp.gate.e_score_correction_bias"] = _WHOLE.rows(_num_experts(config))
        shared = _gated_mlp(hidden, config["n_shared_experts"] * size, share)
        elements |= _prefixed("mlp.shared_experts.", shared)
    one = _gated_mlp(hidden, size, expert_share)
    for expert in experts:
        elements |= _prefixed(f"mlp.experts.{expert}.", one)
    return elements


def _in_layer(layer: int, elements: Elements) -> Elements:
    return _prefixed(f"model.layers.{layer}.", elements)


# --- both sides --------------------------------------------------------------------------------


def _chunks(config: Config, training: Training) -> Iterator[tuple[int, range]]:
    """(pipeline stage, layers) of every chunk; chunks go round the stages."""
    num_chunks, layers = training.pp * training.vpp, config["num_hidden_layers"]
    sizes = training.layers or (layers // num_chunks,) * num_chunks
    assert sum(sizes) == layers and len(sizes) == num_chunks
    for number, (first, end) in enumerate(pairwise(accumulate(sizes, initial=0))):
        yield number % training.pp, range(first, end)


def held(config: Config, training: Training, rank: int) -> Elements:
    """What a training rank holds.

    Ranks of a stage are neighbours. In a stage, dense tensors are cut over ``tp`` neighbours;
    experts over ``etp`` neighbours and spread, in runs, over ``ep`` of those groups. With
    ``extend_ep`` whole experts are spread over ``ep x tp`` ranks.
    """
    stage, position = divmod(rank, training.world // training.pp)
    share = _Share(position % training.tp, training.tp)
    etp, ep = training.etp or training.tp, training.ep
    if training.extend_ep:
        etp, ep = 1, training.ep * training.tp
    per_rank = _num_experts(config) // ep
    first = position // etp % ep * per_rank
    experts, expert_share = range(first, first + per_rank), _Share(position % etp, etp)
    elements: Elements = {}
    for where, layers in _chunks(config, training):
        if where == stage:
            for layer in layers:
                of_layer = _layer(config, layer, share, experts, expert_share)
                elements |= _in_layer(layer, of_layer)
    embedding = share.vocabulary(
        config["vocab_size"], config["hidden_size"], MEGATRON_VOCAB_DIVISOR * training.tp
    )
    if stage == 0:
        elements["model.embed_tokens.weight"] = embedding
    if stage == training.pp - 1:
        elements["model.norm.weight"] = _WHOLE.rows(config["hidden_size"])
        tied = config["tie_word_embeddings"]
        elements["model.embed_tokens.weight" if tied else "lm_head.weight"] = embedding
    return elements


def _engine_layers(num_layers: int, pp: int) -> list[list[int]]:
    """Layers of each stage of an engine: vLLM gives one more to stages from the last but one on."""
    sizes = [num_layers // pp] * pp
    for extra in range(num_layers % pp):
        sizes[-2 - extra] += 1
    layers = iter(range(num_layers))
    return [[next(layers) for _ in range(size)] for size in sizes]


def needed(config: Config, rollout: Rollout, rank: int) -> Elements:
    """What a vLLM rank needs: its tensor-parallel share, and whole experts or a slice of each.

    The ranks of all ``dp`` at one stage share out its experts. A tied embedding is on the first
    and on the last stage.
    """
    share = _Share(rank % rollout.tp, rollout.tp)
    stage = rank // rollout.tp % rollout.pp
    replica = rank // (rollout.tp * rollout.pp) % rollout.dp
    size = rollout.tp * rollout.dp
    position = replica * rollout.tp + share.index
    slots = rollout.slots or tuple(range(_num_experts(config)))
    experts: Iterable[int] = slots
    expert_share = _Share(position, size)
    if rollout.ep > 1:
        assert rollout.ep == size
        per_rank = len(slots) // size
        first = position * per_rank
        experts, expert_share = slots[first : first + per_rank], _WHOLE
    elements: Elements = {}
    for layer in _engine_layers(config["num_hidden_layers"], rollout.pp)[stage]:
        elements |= _in_layer(layer, _layer(config, layer, share, experts, expert_share))
    vocabulary = share.vocabulary(config["vocab_size"], config["hidden_size"], VLLM_VOCAB_MULTIPLE)
    last, tied = stage == rollout.pp - 1, config["tie_word_embeddings"]
    if stage == 0 or (last and tied):
        elements["model.embed_tokens.weight"] = vocabulary
    if last:
        elements["model.norm.weight"] = _WHOLE.rows(config["hidden_size"])
        if not tied:
            elements["lm_head.weight"] = vocabulary
    return elements


def receive_floor(config: Config, training: Training, rollout: Rollout, rank: int) -> int:
    """Bytes that a rank lacks: they must arrive, whoever sends them."""
    return bytes_missing(needed(config, rollout, rank), held(config, training, rank))


def node_floor(
    config: Config, training: Training, rollout: Rollout, node: int, ranks_per_node: int
) -> int:
    """Bytes that no rank of a node holds and some rank of it needs, each counted once."""
    first = node * ranks_per_node
    ranks = range(first, min(first + ranks_per_node, training.world))
    return bytes_missing(
        union(needed(config, rollout, rank) for rank in ranks),
        union(held(config, training, rank) for rank in ranks),
    )
