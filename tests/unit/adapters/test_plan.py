"""Which rows and columns of which HF tensors the adapters of a rank cover, and their memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.published import published_config

from mindspeed_rl.adapters.plan import adapter_shapes, check_adapters, merge_bytes, plan_adapters
from mindspeed_rl.algorithms.lora import LINEAR_LAYERS, LoraSettings
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.layout import ParallelLayout
from mindspeed_rl.core.stages import even_stages
from mindspeed_rl.models.param_names import TRANSFORMER_ENGINE
from mindspeed_rl.models.registry import spec_from_hf_config
from mindspeed_rl.planning.model_state import model_state, save_host_bytes
from mindspeed_rl.weight_layouts.base import pieces_of
from mindspeed_rl.weight_layouts.megatron import MegatronLayout

_DENSE = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 10, "head_dim": 2,
}  # fmt: skip
_EXPERTS = _DENSE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}


def layout_of(
    world: int = 1, model: str = "qwen2.5-7b", pp: int = 1, **sizes: Any
) -> MegatronLayout:
    changes = _EXPERTS if "30b" in model else {k: v for k, v in _DENSE.items() if k != "head_dim"}
    parallel = ParallelLayout.build(world=world, stages=even_stages(2, pp), **sizes)
    spec = spec_from_hf_config(published_config(model) | changes)
    return MegatronLayout(spec, parallel, vocab_divisor=4)


LAYOUTS = {
    "one": layout_of(),
    "tp2-pp2": layout_of(8, tp=2, pp=2),
    "tp4": layout_of(4, tp=4),
    "experts": layout_of(1, "qwen3-30b-a3b"),
    "tp2-ep2": layout_of(4, "qwen3-30b-a3b", tp=2, ep=2, etp=1),
    "etp2-ep2-pp2": layout_of(8, "qwen3-30b-a3b", tp=2, ep=2, pp=2),
}


@given(
    name=st.sampled_from(sorted(LAYOUTS)),
    layers=st.sets(st.sampled_from(LINEAR_LAYERS), min_size=1),
)
def test_rows_and_columns_are_those_of_the_table(name: str, layers: set[str]) -> None:
    """Every row of an adapted parameter is the row of the HF tensor that the table puts there."""
    layout, lora = LAYOUTS[name], LoraSettings(2, lora_target=tuple(sorted(layers)))
    for rank in range(layout.parallel.world):
        plan = plan_adapters(layout, rank, lora)
        expected: dict[tuple[str, int], tuple[str, int, int, int]] = {}
        for shard in pieces_of(layout, rank):
            piece = shard.piece
            if lora.covers(piece.hf_name):
                (first, left), (count, width) = piece.hf_box.lo, piece.hf_box.size
                for i in range(count):
                    place = (piece.param, piece.param_box.lo[0] + i)
                    expected[place] = (piece.hf_name, first + i, left, left + width)
        found = {}
        for param in plan.params.values():
            rows = [(r.hf_name, r.first + i) for r in param.runs for i in range(r.count)]
            assert len(rows) == layout.local_shapes(rank)[param.name][0]
            for at, (hf_name, row) in enumerate(rows):
                if hf_name:
                    found[param.name, at] = (hf_name, row, *param.columns)
        assert found == expected
        assert {hf_name for hf_name, *_ in expected.values()} == set(plan.shapes)


def test_runs_of_fused_projections() -> None:
    """By hand: two query groups of four query heads; k and v follow each, heads of 2 rows."""
    plan = plan_adapters(LAYOUTS["tp4"], 1, LoraSettings(2, lora_target=("q_proj", "v_proj")))
    (param, _) = plan.params.values()
    start = "model.layers.0.self_attn."
    runs = [(run.hf_name.removeprefix(start), run.first, run.count) for run in param.runs]
    assert runs == [("q_proj.weight", 4, 4), ("", 0, 2), ("v_proj.weight", 2, 2)]
    assert plan.factor_shapes(2)[start + "q_proj.lora_A.weight"] == (2, 16)
    assert plan.factor_shapes(2)[start + "v_proj.lora_B.weight"] == (8, 2)


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_all_ranks_together_have_every_adapter(name: str) -> None:
    layout, lora = LAYOUTS[name], LoraSettings(3)
    held = Counter(
        hf_name
        for rank in range(layout.parallel.world)
        for hf_name in plan_adapters(layout, rank, lora).shapes
    )
    assert set(held) == {n for n in layout.hf_shapes if lora.covers(n)}
    shapes = adapter_shapes(layout, lora)
    assert len(shapes) == 2 * len(held) and all(3 in shape for shape in shapes)


@pytest.mark.parametrize("distributed", [False, True])
def test_memory_by_hand(distributed: bool) -> None:
    """Gradients and optimizer of the adapters alone; parameters of the base as well."""
    layout, lora = LAYOUTS["one"], LoraSettings(2, lora_target=("o_proj",))
    adapters = 2 * (2 * 16 + 16 * 2)
    base = sum(map(prod, layout.local_shapes(0).values()))
    how: dict[str, Any] = {"bf16": True, "distributed_optimizer": distributed}
    state = model_state(layout, 0, **how, lora=lora)
    padded = 2 * (64 + 64) if distributed else adapters
    assert state.grad_buffers == padded * 4
    assert state.parameters == (padded + base) * 2
    assert state.optimizer == adapters * 12 and state.optimizer_at_start == adapters * 4
    assert state.plain_parameters == adapters * 2
    assert merge_bytes(layout, 0, lora) == 16 * 16 * 8
    wider = replace(lora, lora_target=("up_proj", "o_proj"))
    assert merge_bytes(layout, 0, wider) == 2 * 24 * 16 * 8, "gate and up are one parameter"
    saved = save_host_bytes(
        layout, 0, bf16=True, with_optimizer=True, in_background=True, on_host=False, lora=lora
    )
    assert saved == adapters * 14


def test_refusals() -> None:
    layout, lora = LAYOUTS["one"], LoraSettings(2)
    check_adapters(layout, lora)
    with pytest.raises(UsageError, match=r"--lora-rank 2: the linear layers of Transformer"):
        check_adapters(replace(layout, modules=TRANSFORMER_ENGINE), lora)
    check_adapters(replace(layout, modules=TRANSFORMER_ENGINE), LoraSettings())
