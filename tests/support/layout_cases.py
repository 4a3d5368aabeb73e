"""Models and pairs of layouts for tests: two fixed ones and a hypothesis strategy."""

from __future__ import annotations

from dataclasses import replace
from math import lcm

from hypothesis import strategies as st
from support.layout_oracle import Case

from mindspeed_rl.models.rope import RopeSpec
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.parallel.layout import EngineLayout, ParallelLayout
from mindspeed_rl.parallel.stages import even_stages
from mindspeed_rl.resharding.layouts.megatron import MegatronLayout
from mindspeed_rl.resharding.layouts.vllm import VllmLayout


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any model and pair of layouts that fits, up to 16 ranks."""
    tp, pp, cp, dp = (draw(st.sampled_from(sizes)) for sizes in ((1, 2), (1, 2, 3), (1, 2), (1, 2)))
    world = tp * pp * cp * dp
    engine_tp = draw(st.sampled_from([n for n in (1, 2, 4, 8) if world % n == 0]))
    kv_heads = tp * draw(st.sampled_from([1, 2, 3]))
    kv_fits = kv_heads % engine_tp == 0 or engine_tp % kv_heads == 0
    kv_heads = kv_heads if kv_fits else lcm(tp, engine_tp)
    per_group = lcm(kv_heads, engine_tp) // kv_heads * draw(st.sampled_from([1, 3]))
    return Case(
        num_layers=pp * draw(st.sampled_from([1, 2])),
        hidden=draw(st.integers(1, 5)),
        ffn=lcm(tp, engine_tp) * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        heads_per_group=per_group,
        head_dim=draw(st.integers(1, 3)),
        vocab=draw(st.integers(2, 150)),
        tied=draw(st.booleans()),
        tp=tp,
        pp=pp,
        cp=cp,
        dp=dp,
        vocab_divisor=draw(st.sampled_from([1, 7, 64])),
        engine_tp=engine_tp,
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


def spec_of(case: Case) -> ModelSpec:
    return ModelSpec(
        family="qwen2",
        num_layers=case.num_layers,
        hidden_size=case.hidden,
        ffn_hidden_size=case.ffn,
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        vocab_size=case.vocab,
        norm_eps=1e-6,
        rope=RopeSpec(1e4),
        max_position_embeddings=64,
        tie_embeddings=case.tied,
        qkv_bias=True,
    )


def layouts_of(case: Case) -> tuple[MegatronLayout, VllmLayout]:
    spec = spec_of(case)
    parallel = ParallelLayout.build(
        world=case.world, stages=even_stages(case.num_layers, case.pp), tp=case.tp, cp=case.cp
    )
    return (
        MegatronLayout(spec, parallel, case.vocab_divisor),
        VllmLayout(spec, EngineLayout(case.world, case.engine_tp)),
    )
