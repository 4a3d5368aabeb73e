"""Models whose layers differ: memory, cache, operations and weight rows are sums over the layers.

Expected numbers are written out by hand for two kinds of attention and two kinds of MLP.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import prod

import pytest
from check_mapping import check_layout

from mindspeed_rl.config import ModelConfig, ParallelConfig, TrainConfig
from mindspeed_rl.config.architecture import check_architecture
from mindspeed_rl.config.layouts import training_layout
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.layout import EngineLayout, ParallelLayout
from mindspeed_rl.core.stages import even_stages
from mindspeed_rl.engines.vllm.capabilities import check_model_support
from mindspeed_rl.engines.vllm.layout import VllmLayout
from mindspeed_rl.models import registry
from mindspeed_rl.models.blocks import (
    DENSE_MLP,
    EMBEDDING,
    EXPERTS,
    GROUPED_ATTENTION,
    HEAD,
    LATENT_ATTENTION,
)
from mindspeed_rl.models.flops import active_parameters, attention_flops
from mindspeed_rl.models.layers import (
    DenseMLP,
    GroupedQueryAttention,
    LatentAttention,
    LayerSpec,
    MoE,
)
from mindspeed_rl.models.rope import RopeSpec
from mindspeed_rl.models.rules import WeightTable
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.models.tensors import num_parameters, tensor_groups
from mindspeed_rl.planning.activations import TrainingMemory, Workload
from mindspeed_rl.planning.engine_memory import EngineMemory
from mindspeed_rl.planning.model_state import model_state
from mindspeed_rl.rollout.provider import EngineSizes
from mindspeed_rl.weight_layouts.megatron import MegatronLayout

WIDE = GroupedQueryAttention(num_heads=4, num_kv_heads=4, head_dim=6)
NARROW = GroupedQueryAttention(num_heads=4, num_kv_heads=2, head_dim=2, qk_norm=True)
LATENT = LatentAttention(
    num_heads=4, q_lora_rank=0, kv_lora_rank=5, nope_head_dim=4, rope_head_dim=2, v_head_dim=3
)
DENSE, MOE = DenseMLP(12), MoE(num_experts=4, top_k=2, expert_ffn_size=8)
HIDDEN, VOCAB = 8, 10
# elements of the matrices and norms of each part, by hand
_WIDE, _NARROW = 4 * HIDDEN * 24, (8 + 2 * 4 + 8) * HIDDEN + 2 * 2
_LATENT = 24 * HIDDEN + (5 + 2) * HIDDEN + 5 + 4 * (4 + 3) * 5 + HIDDEN * 12
_DENSE, _EXPERT, _ROUTER, _NORMS = 3 * HIDDEN * 12, 3 * HIDDEN * 8, 4 * HIDDEN, 2 * HIDDEN
_OUTSIDE = 2 * VOCAB * HIDDEN + HIDDEN

TABLE = WeightTable(
    "mixed", ("MixedForCausalLM",),
    (EMBEDDING, GROUPED_ATTENTION, LATENT_ATTENTION, DENSE_MLP, EXPERTS, HEAD),
)  # fmt: skip


@pytest.fixture(autouse=True)
def mixed_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """One table for all kinds that are known."""
    monkeypatch.setattr(registry, "_families", lambda: ((TABLE, lambda config: None),))


def spec_of(*layers: LayerSpec) -> ModelSpec:
    return ModelSpec("mixed", layers, HIDDEN, 12, VOCAB, 1e-6, RopeSpec(1e4), 64, False)


SIZES = spec_of(*(LayerSpec(WIDE, DENSE), LayerSpec(NARROW, MOE)) * 2)
KINDS = spec_of(LayerSpec(WIDE, DENSE), LayerSpec(LATENT, MOE), LayerSpec(NARROW, DENSE))

SMALL = EngineSizes(batched_tokens=16, sequences=1, block_tokens=4)


def trainer_of(spec: ModelSpec, pp: int = 1) -> MegatronLayout:
    parallel = ParallelLayout.build(
        world=4 * pp, stages=even_stages(spec.num_layers, pp), tp=2, ep=2, etp=1
    )
    return MegatronLayout(spec, parallel, vocab_divisor=5)


def test_parameters_are_those_of_every_layer() -> None:
    experts = 4 * _EXPERT + _ROUTER
    sizes = 2 * (_WIDE + _DENSE) + 2 * (_NARROW + experts) + 4 * _NORMS + _OUTSIDE
    assert num_parameters(SIZES) == sizes
    kinds = _WIDE + _LATENT + _NARROW + 2 * _DENSE + experts + 3 * _NORMS + _OUTSIDE
    assert num_parameters(KINDS) == kinds


def test_rows_go_to_the_layers_of_their_kind_in_their_size() -> None:
    """Patterns that several kinds share have a shape for each."""
    found = {n: g.shape for g in tensor_groups(KINDS) for n in g.names()}
    heads = {n: found[f"model.layers.{n}.self_attn.q_proj.weight"] for n in range(3)}
    assert heads == {0: (24, HIDDEN), 1: (24, HIDDEN), 2: (8, HIDDEN)}
    outputs = {n: found[f"model.layers.{n}.self_attn.o_proj.weight"] for n in range(3)}
    assert outputs == {0: (HIDDEN, 24), 1: (HIDDEN, 12), 2: (HIDDEN, 8)}
    layers = {
        tail: {int(name.split(".")[2]) for name in found if name.endswith(tail)}
        for tail in ("k_proj.weight", "kv_b_proj.weight", "q_norm.weight", "mlp.gate.weight")
    }
    assert list(layers.values()) == [{0, 2}, {1}, {2}, {1}]
    names = [
        row.param for row in TABLE.engine_rows(KINDS, "vllm") if "input_layernorm" in row.param
    ]
    assert len(names) == 2, "of grouped-query and of latent attention"


@pytest.mark.parametrize("spec", [SIZES, KINDS], ids=["sizes", "kinds"])
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_every_element_is_once_on_both_sides(spec: ModelSpec, expert_parallel: bool) -> None:
    whole = {name: group.shape for group in tensor_groups(spec) for name in group.names()}
    pp = 2 if spec is SIZES else 1
    trainer = trainer_of(spec, pp)
    engine = VllmLayout(spec, EngineLayout(4, 2, 2, expert_parallel))
    for layout in (trainer, engine):
        assert check_layout(layout) == []
        assert layout.hf_shapes == whole
        assert {name: layout.shape_of(name) for name in whole} == whole
        assert sum(len(unit.names) for unit in layout.units()) == len(whole)
    assert sum(prod(s) for s in trainer.local_shapes(0).values()) == sum(
        prod(shard.piece.hf_box.size)
        for name in trainer.held_names(0)
        for shard in trainer.shards(name)
        if 0 in shard.owner_ranks
    )


def test_tensors_of_layers_that_differ_are_not_placed_alike() -> None:
    layout = trainer_of(SIZES)
    names = [f"model.layers.{n}.self_attn.o_proj.weight" for n in range(4)]
    keys = [layout.placement_key(name) for name in names]
    assert keys[0] == keys[2] != keys[1] == keys[3]
    assert [layout.rotation_period(name) for name in names] == [(2, 1)] * 4


def test_the_cache_of_a_token_is_a_sum_over_layers() -> None:
    assert SIZES.cached_values(tp=2) == 2 * (2 * 2 * 6) + 2 * (2 * 1 * 2)
    assert KINDS.cached_values(tp=2) == 2 * 2 * 6 + (5 + 2) + 2 * 1 * 2
    engine = EngineMemory(VllmLayout(KINDS, EngineLayout(2, 2)), 2, SMALL, 1 << 20)
    assert engine.token_bytes() == 2 * KINDS.cached_values(tp=2)


def test_the_engine_has_room_for_its_widest_layer() -> None:
    """The copies of latent attention are those of its layers alone."""
    layout = VllmLayout(KINDS, EngineLayout(1, 1))
    memory = EngineMemory(layout, 2, SMALL, 0)
    experts = 2 * (2 * HIDDEN + 3 * 8)  # two copies of a token: taken, given back, gate and up
    attention = 2 * 24 + 2 * 24
    assert attention > experts > 3 * 12
    assert memory.workspace() == 16 * (2 * HIDDEN + attention) * 2
    copying = replace(memory, sizes=replace(SMALL, copies_latent=True))
    copies = copying.weights(0) - memory.weights(0)
    assert copies == 4 * (4 + 3) * 5 * 2


def test_operations_are_a_sum_over_layers() -> None:
    pairs = 2 * 4 * (6 + 6) + 2 * 4 * (6 + 3) + 2 * 4 * (2 + 2)
    assert attention_flops(KINDS, 10.0) == pairs * 10 / 2
    assert num_parameters(KINDS) - active_parameters(KINDS) == 2 * _EXPERT + VOCAB * HIDDEN
    few = spec_of(*[LayerSpec(WIDE, replace(MOE, top_k=1))] * 2, LayerSpec(WIDE, MOE))
    assert num_parameters(few) - active_parameters(few) == (3 + 3 + 2) * _EXPERT + VOCAB * HIDDEN


def test_memory_of_a_stage_is_that_of_its_own_layers() -> None:
    """bf16, 16 tokens over tp 2: queries, keys, values, output; row statistics of 4 heads."""
    spec = spec_of(*[LayerSpec(WIDE, DENSE)] * 2, *[LayerSpec(NARROW, DenseMLP(20))] * 2)
    memory = TrainingMemory(trainer_of(spec, pp=2), TrainConfig(bf16=True), False)
    work = Workload(tokens=16, trained=8, num_micro_batches=1)
    stream = 4 * 16 * HIDDEN * 2
    wide = stream + 8 * 4 * 24 * 2 + 8 * 4 * 4 + 3 * 8 * 12 * 2
    narrow = stream + 8 * (2 * 8 + 4 + 4 + 8 + 4) * 2 + 8 * 4 * 4 + 3 * 8 * 20 * 2
    assert memory.kept_by(range(2), work) == 2 * wide
    assert memory.kept_by(range(2, 4), work) == 2 * narrow
    assert memory.inference(0, work) == wide
    states = [
        model_state(memory.layout, rank, bf16=True, distributed_optimizer=False) for rank in (0, 4)
    ]
    wide = (_WIDE + _DENSE) // 2 + _NORMS
    narrow = (_NARROW - 4 + 3 * HIDDEN * 20) // 2 + 4 + _NORMS
    vocabulary = VOCAB * HIDDEN // 2
    assert states[0].plain_parameters == 2 * (2 * wide + vocabulary)
    assert states[1].plain_parameters == 2 * (2 * narrow + vocabulary + HIDDEN)


class _NewKind:
    """A kind of MLP that no plan knows: 200 elements per token, one copy of 10 to experts."""

    kind, recompute_module, ffn_hidden_size = "dense", "new", 12
    saved_values, engine_values, top_k, copy_values, routing_values = 200, 100, 1, 10, 3


class _Quarter(MoE):
    active_share = Fraction(1, 4)


def test_a_new_kind_of_mlp_is_priced_by_what_it_gives() -> None:
    """bf16, 16 tokens over tp 2; a copy of a token has an input of 8, and an output in engines."""
    spec = spec_of(LayerSpec(WIDE, _NewKind()))
    memory = TrainingMemory(trainer_of(spec), TrainConfig(bf16=True), False)
    parts = memory.layer_parts(0, Workload(tokens=16, trained=8, num_micro_batches=1))
    assert parts["new"] == 16 * (200 // 2 + HIDDEN + 10) * 2 + 16 * 3 * 4
    engine = EngineMemory(VllmLayout(spec, EngineLayout(1, 1)), 2, SMALL, 0)
    assert engine.workspace() == 16 * (2 * HIDDEN + 100 + 2 * HIDDEN + 10) * 2
    quarter = spec_of(LayerSpec(WIDE, _Quarter(num_experts=4, top_k=2, expert_ffn_size=8)))
    assert num_parameters(quarter) - active_parameters(quarter) == 3 * _EXPERT + VOCAB * HIDDEN


@pytest.mark.parametrize(
    ("layers", "what"),
    [
        ((LayerSpec(WIDE, DENSE), LayerSpec(NARROW, DENSE)), "attention: GroupedQuery.*head_dim=6"),
        ((LayerSpec(WIDE, DENSE), LayerSpec(LATENT, DENSE)), "attention: .*LatentAttention"),
        ((LayerSpec(WIDE, DENSE), LayerSpec(WIDE, DenseMLP(20))), "the size of dense MLPs: 12, 20"),
    ],
)
def test_what_the_trainer_cannot_build_is_refused_before_it_is(
    layers: tuple[LayerSpec, ...], what: str
) -> None:
    """megatron-core's configuration has one attention and one MLP size for all layers."""
    spec = spec_of(*layers)
    with pytest.raises(UsageError, match=what):
        check_architecture(ModelConfig(), spec, tp=1)
        training_layout(ModelConfig(), ParallelConfig(), spec, world=1)


def test_flags_are_compared_with_every_attention_of_the_model() -> None:
    spec = spec_of(LayerSpec(WIDE, DENSE), LayerSpec(NARROW, DENSE), LayerSpec(LATENT, DENSE))
    check_architecture(ModelConfig(num_attention_heads=4), spec, tp=1)
    with pytest.raises(UsageError, match="--kv-channels 6"):
        check_architecture(ModelConfig(kv_channels=6), spec, tp=1)


def test_what_the_engine_and_the_trainer_know_one_of() -> None:
    with pytest.raises(UsageError, match="head_dim 6"):
        check_model_support("cpu", KINDS)
    check_model_support("cpu", spec_of(LayerSpec(replace(WIDE, head_dim=64), MOE)))
    other = spec_of(LayerSpec(WIDE, MOE), LayerSpec(WIDE, replace(MOE, top_k=1)))
    with pytest.raises(UsageError, match=r"differ in experts: .*top_k=2.*top_k=1"):
        training_layout(ModelConfig(), ParallelConfig(), other, world=1)
    more = spec_of(LayerSpec(WIDE, MOE), LayerSpec(WIDE, replace(MOE, num_experts=8)))
    with pytest.raises(UsageError, match="experts: 4, 8"):
        trainer_of(more)
