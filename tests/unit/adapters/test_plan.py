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
_LATENT = {k: v for k, v in _DENSE.items() if k != "head_dim"} | {
    "num_key_value_heads": 8, "q_lora_rank": 6, "kv_lora_rank": 10, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2, "v_head_dim": 3, "first_k_dense_replace": 1, "n_routed_experts": 8,
    "moe_intermediate_size": 12, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "qwen2.5-7b": {k: v for k, v in _DENSE.items() if k != "head_dim"},
    "qwen3-30b-a3b": _EXPERTS,
    "deepseek-v3": _LATENT,
}


def layout_of(
    world: int = 1, model: str = "qwen2.5-7b", pp: int = 1, **sizes: Any
) -> MegatronLayout:
    changes = CHANGES[model]
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
    "latent": layout_of(1, "deepseek-v3"),
    "latent-tp2-ep2-pp2": layout_of(16, "deepseek-v3", tp=2, ep=2, etp=1, pp=2),
    "latent-etp2-cp2": layout_of(8, "deepseek-v3", tp=2, cp=2),
}


@given(
    name=st.sampled_from(sorted(LAYOUTS)),
    layers=st.sets(st.sampled_from(LINEAR_LAYERS)).map(lambda chosen: chosen | {"o_proj"}),
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


def test_copied_parameters() -> None:
    """With latent attention both ranks have the whole down projections, and half of the others."""
    plan = plan_adapters(LAYOUTS["latent-etp2-cp2"], 1, LoraSettings(2))
    start = "decoder.layers.0.self_attention."
    attention = [name for name in plan.params if name.startswith(start)]
    copied = {n.removeprefix(start) for n in attention if plan.is_copied(n)}
    assert copied == {"linear_q_down_proj.weight", "linear_kv_down_proj.weight"}
    assert len(attention) == 5
    (run,) = plan.params[start + "linear_kv_up_proj.weight"].runs
    assert (run.first, run.count) == (4 * (4 + 3), 4 * (4 + 3))
    assert plan.shapes["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"] == (10 + 2, 16)
    experts = [name for name in plan.params if ".experts." in name]
    assert experts and not any(map(plan.is_copied, experts))


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
    check_adapters(layout, lora, "cuda")
    foreign = replace(layout, modules=TRANSFORMER_ENGINE)
    with pytest.raises(UsageError, match=r"--lora-rank 2: .* Transformer Engine .*-impl local"):
        check_adapters(foreign, lora, "cuda")
    check_adapters(foreign, LoraSettings(), "cuda")
    check_adapters(foreign, lora, "npu")  # MindSpeed's
    allowed = "allowed: q_proj k_proj v_proj o_proj gate_proj up_proj down_proj, or all-linear"
    with pytest.raises(UsageError, match=rf"--lora-target kv_b_proj: .* no such layer; {allowed}"):
        check_adapters(layout, LoraSettings(2, lora_target=("o_proj", "kv_b_proj")), "cpu")
    with pytest.raises(UsageError, match=r"--lora-target k_proj: .* kv_a_proj_with_mqa kv_b_proj"):
        check_adapters(LAYOUTS["latent"], LoraSettings(2, lora_target=("k_proj",)), "cpu")
    check_adapters(
        LAYOUTS["latent"], LoraSettings(2, lora_target=("linear_qkv", "linear_kvb")), "cpu"
    )
