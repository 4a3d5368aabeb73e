"""Models and pairs of layouts for tests: fixed ones and hypothesis strategies."""

from __future__ import annotations

from dataclasses import replace
from math import gcd, lcm
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st
from support.layout_arrays import Case, Latent

from mindspeed_rl.core.layout import EngineLayout, ParallelLayout
from mindspeed_rl.core.stages import even_stages, listed_stages
from mindspeed_rl.engines.vllm.layout import VOCAB_PADDING, VllmLayout
from mindspeed_rl.models.layers import (
    Attention,
    DenseMLP,
    GroupedQueryAttention,
    LatentAttention,
    LayerSpec,
    MoE,
)
from mindspeed_rl.models.rope import RopeSpec
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.weight_layouts.megatron import MegatronLayout

MAX_WORLD, MAX_EXPERTS = 16, 32
_SIZES = (1, 2, 3, 4, 6, 8)


def _divisors(number: int, limit: int = MAX_WORLD) -> list[int]:
    return [n for n in _SIZES if n <= limit and number % n == 0]


@st.composite
def _stages(draw: st.DrawFn, pp: int) -> dict[str, Any]:
    """Layers of each chunk: even, interleaved, listed or with empty slots."""
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    chunks = pp * vpp
    kind = draw(st.sampled_from(["even", "listed", "noop"])) if pp > 1 else "even"
    if kind == "listed":
        counts = draw(st.lists(st.integers(0, 2), min_size=chunks, max_size=chunks).filter(any))
        return {"num_layers": sum(counts), "vpp": vpp, "layer_list": tuple(counts)}
    slots = chunks * draw(st.sampled_from([1, 2] if vpp == 1 else [1]))
    noop: set[int] = set()
    if kind == "noop":
        noop = draw(st.sets(st.integers(0, slots - 1), min_size=1, max_size=slots - 1))
    return {"num_layers": slots - len(noop), "vpp": vpp, "noop": tuple(sorted(noop))}


@st.composite
def _experts(
    draw: st.DrawFn, tp: int, ranks_per_stage: int, world: int, num_layers: int
) -> dict[str, Any]:
    """Experts and how both sides share them; shapes that all sizes divide."""
    etp = draw(st.sampled_from(_divisors(ranks_per_stage, 4)))
    ep = draw(st.sampled_from(_divisors(ranks_per_stage // etp, 4)))
    engine_tp = draw(st.sampled_from(_divisors(world, 4)))
    engine_dp = draw(st.sampled_from(_divisors(world // engine_tp, 4)))
    size = engine_tp * engine_dp
    engine_ep = lcm(ep, size) <= MAX_EXPERTS and draw(st.booleans())
    fewest = lcm(ep, size if engine_ep else 1)
    experts = fewest * draw(st.sampled_from([1, 2] if 2 * fewest <= MAX_EXPERTS else [1]))
    physical: list[int] = []
    if engine_ep and draw(st.booleans()):
        extra = draw(st.lists(st.integers(0, experts - 1), min_size=size, max_size=size))
        physical = draw(st.permutations([*range(experts), *extra]))
    slots = physical or range(experts)
    moved = draw(st.sets(st.integers(0, num_layers - 1))) if engine_ep else ()
    dense_first = draw(st.integers(0, num_layers - 1))
    return {
        "etp": etp,
        "ep": ep,
        "engine_tp": engine_tp,
        "engine_dp": engine_dp,
        "engine_ep": engine_ep,
        "physical_experts": tuple(physical),
        "layer_experts": tuple((n, tuple(draw(st.permutations(slots)))) for n in sorted(moved)),
        "experts": experts,
        "expert_ffn": lcm(etp, 1 if engine_ep else size) * draw(st.integers(1, 3)),
        "moe_layers": tuple(layer >= dense_first for layer in range(num_layers)),
        "shared_ffn": draw(st.sampled_from([0, 2 * lcm(tp, engine_tp)])),
        "router_bias": draw(st.booleans()),
        "expert_multiple": draw(st.sampled_from([1, 3, 32])),
        "transposed": draw(st.booleans()),
        "whole_shared": draw(st.booleans()),
        "flashcomm": engine_ep and engine_tp > 1 and draw(st.booleans()),
    }


@st.composite
def _attention(draw: st.DrawFn, tp: int, engine_tp: int, latent: bool) -> dict[str, Any]:
    if latent:
        ranks, sizes = st.sampled_from([0, 3]), st.integers(1, 3)
        return {
            "kv_heads": lcm(tp, engine_tp) * draw(st.integers(1, 2)),
            "heads_per_group": 1,
            "head_dim": 0,
            "qkv_bias": False,
            "latent": Latent(draw(ranks), *(draw(sizes) for _ in range(4))),
        }
    kv_heads = draw(st.sampled_from([1, tp, 2 * tp, 3 * tp]))
    kv_fits = kv_heads % engine_tp == 0 or engine_tp % kv_heads == 0
    kv_heads = kv_heads if kv_fits else lcm(tp, engine_tp)
    heads = lcm(kv_heads, engine_tp, tp) * draw(st.sampled_from([1, 3]))
    # fewer key/value heads than trainer ranks: runs of rows, which must divide
    uneven = tp // gcd(tp, heads + 2 * kv_heads)
    return {
        "kv_heads": kv_heads,
        "heads_per_group": heads // kv_heads,
        "head_dim": uneven * draw(st.integers(1, 3)),
        "qkv_bias": draw(st.booleans()),
        "qk_norm": draw(st.booleans()),
    }


@st.composite
def _vocabulary(draw: st.DrawFn, engine_tp: int) -> int:
    """vLLM's ranks share the rows in whole blocks of 64 and refuse what they cannot share."""
    blocks = engine_tp // gcd(engine_tp, VOCAB_PADDING)
    if blocks == 1:
        return draw(st.integers(2, 150))
    return draw(st.integers((blocks - 1) * VOCAB_PADDING + 1, blocks * VOCAB_PADDING))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any model and pair of layouts that fits, up to ``MAX_WORLD`` ranks."""
    tp, pp = draw(st.sampled_from((1, 2, 3, 4, 6))), draw(st.sampled_from((1, 2, 3)))
    assume(tp * pp <= MAX_WORLD)
    cp = draw(st.sampled_from([n for n in (1, 2) if tp * pp * n <= MAX_WORLD]))
    dp = draw(st.sampled_from([n for n in (1, 2, 3, 4) if tp * pp * cp * n <= MAX_WORLD]))
    world = tp * pp * cp * dp
    fields = draw(_stages(pp))
    experts = draw(st.booleans())
    if experts:
        fields |= draw(_experts(tp, world // pp, world, fields["num_layers"]))
    else:
        fields["engine_tp"] = draw(st.sampled_from(_divisors(world)))
    engine_tp = fields["engine_tp"]
    fields |= draw(_attention(tp, engine_tp, experts and draw(st.booleans())))
    return Case(
        **fields,
        hidden=draw(st.integers(1, 5)),
        ffn=lcm(tp, engine_tp) * draw(st.integers(1, 3)),
        vocab=draw(_vocabulary(engine_tp)),
        tied=draw(st.booleans()),
        tp=tp,
        pp=pp,
        cp=cp,
        dp=dp,
        vocab_divisor=draw(st.sampled_from([1, 7, 64])),
        ranks_per_node=draw(st.integers(1, 17)),
    )


GQA = Case(
    num_layers=4,
    hidden=3,
    ffn=8,
    kv_heads=2,
    heads_per_group=6,
    head_dim=2,
    vocab=67,
    tied=False,
    tp=2,
    pp=2,
    cp=1,
    dp=2,
    vocab_divisor=8,
    engine_tp=4,
    ranks_per_node=4,
)
TIED = replace(GQA, tied=True, engine_tp=8, ranks_per_node=3, heads_per_group=4)
# Qwen3-MoE: experts cut by ETP and EP in training, sliced and padded over tp x dp in the engine;
# interleaved stages
MOE = replace(
    GQA,
    qkv_bias=False,
    qk_norm=True,
    experts=4,
    expert_ffn=8,
    moe_layers=(True, False, True, True),
    vpp=2,
    dp=4,
    ep=2,
    etp=2,
    engine_tp=2,
    engine_dp=2,
    expert_multiple=32,
)
# DeepSeek-V3: whole experts over tp x ep (MindSpeed's --moe-tp-extend-ep), uneven stages with an
# empty one, experts of the engine by EP, stored transposed
LATENT = replace(
    MOE,
    qk_norm=False,
    latent=Latent(q_lora=3, kv_lora=4, nope=2, rope=1, v=3),
    kv_heads=4,
    heads_per_group=1,
    head_dim=0,
    experts=8,
    moe_layers=(False, True, True, True),
    shared_ffn=4,
    router_bias=True,
    layer_list=(1, 2, 0, 1),
    ep=4,
    etp=1,
    engine_ep=True,
    transposed=True,
)
# without a compressed query, with empty slots, shared experts whole on every rank
PLAIN_LATENT = replace(
    LATENT,
    latent=replace(LATENT.latent, q_lora=0),
    layer_list=(),
    vpp=1,
    num_layers=3,
    noop=(0,),
    moe_layers=(False, True, True),
    tied=True,
    whole_shared=True,
)
# the same experts cut by the tensor parallelism of engines without expert parallelism
SLICED = replace(LATENT, engine_ep=False, expert_ffn=16, expert_multiple=1)
# neighbours among the experts of a rank, in an order that differs by layer
PLACED = replace(
    LATENT, engine_tp=1, engine_dp=2, ep=2, layer_experts=((1, (6, 7, 0, 3, 1, 2, 4, 5)),)
)
# one expert three times, on ranks of its own and beside others
REDUNDANT = replace(LATENT, physical_experts=(1, 0, 2, 3, 7, 6, 5, 4, 1, 1, 0, 2))
# places that differ by layer, with and without an expert more than once
MOVED = replace(
    REDUNDANT,
    layer_experts=((1, (4, 1, 7, 2, 6, 0, 5, 3, 3, 2, 6, 4)),),
)
# shared experts whole on every rank of engines without data parallelism
FLASHCOMM = replace(LATENT, engine_dp=1, engine_tp=4, flashcomm=True)
FIXED = (GQA, TIED, MOE, LATENT, PLAIN_LATENT, FLASHCOMM)


def _family(case: Case) -> str:
    if case.latent:
        return "deepseek_v3"
    if case.experts:
        return "qwen3_moe"
    return "qwen3" if case.qk_norm else "qwen2" if case.qkv_bias else "llama"


def spec_of(case: Case) -> ModelSpec:
    attention: Attention
    if latent := case.latent:
        attention = LatentAttention(
            case.heads, latent.q_lora, latent.kv_lora, latent.nope, latent.rope, latent.v
        )
    else:
        attention = GroupedQueryAttention(
            case.heads, case.kv_heads, case.head_dim, case.qkv_bias, case.qk_norm
        )
    dense = LayerSpec(attention, DenseMLP(case.ffn))
    layers = (dense,) * case.num_layers
    if case.experts:
        moe = MoE(
            num_experts=case.experts,
            top_k=1,
            expert_ffn_size=case.expert_ffn,
            shared_ffn_size=case.shared_ffn,
            router_bias=case.router_bias,
        )
        layers = tuple(LayerSpec(attention, moe) if has else dense for has in case.moe_layers)
    return ModelSpec(
        family=_family(case),
        layers=layers,
        hidden_size=case.hidden,
        intermediate_size=case.ffn,
        vocab_size=case.vocab,
        norm_eps=1e-6,
        rope=RopeSpec(1e4),
        max_position_embeddings=64,
        tie_embeddings=case.tied,
    )


def with_attention(spec: ModelSpec, attention: Attention) -> ModelSpec:
    """The model with another attention in all layers."""
    layers = tuple(replace(layer, attention=attention) for layer in spec.layers)
    return replace(spec, layers=layers)


def layouts_of(case: Case) -> tuple[MegatronLayout, VllmLayout]:
    spec = spec_of(case)
    if case.layer_list:
        stages = listed_stages(case.num_layers, case.pp, case.layer_list)
    else:
        stages = even_stages(case.num_layers, case.pp, case.vpp, case.noop)
    parallel = ParallelLayout.build(
        world=case.world, stages=stages, tp=case.tp, cp=case.cp, ep=case.ep, etp=case.etp or None
    )
    engine = EngineLayout(case.world, case.engine_tp, case.engine_dp, case.engine_ep)
    return (
        MegatronLayout(spec, parallel, case.vocab_divisor),
        VllmLayout(
            spec,
            engine,
            case.expert_multiple,
            case.physical_experts,
            case.layer_experts,
            case.transposed,
            case.whole_shared,
            case.flashcomm,
        ),
    )
