"""The check of a built model against its spec: what is equal, and what only looks different."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.published import published_config

from mindspeed_rl.models.registry import spec_from_hf_config
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.trainer.built_check import check_built
from mindspeed_rl.trainer.model_config import architecture_fields

SHARED = "moe_shared_expert_intermediate_size"
SCALING = "moe_router_topk_scaling_factor"


def check(spec: ModelSpec, **changed: Any) -> None:
    """Check a model without layers, with some fields of its configuration changed."""
    model: Any = SimpleNamespace(
        config=SimpleNamespace(**architecture_fields(spec) | changed),
        share_embeddings_and_output_weights=spec.tie_embeddings,
        decoder=SimpleNamespace(layers=[]),
        named_modules=list,
    )
    check_built(model, spec, 0)


def test_a_size_of_0_and_a_factor_of_1_mean_that_there_is_none() -> None:
    """MindSpeed's adaptor fills them in on an NPU."""
    spec = spec_from_hf_config(published_config("qwen3-30b-a3b"))
    fields = architecture_fields(spec)
    assert fields[SHARED] is None and fields[SCALING] is None
    check(spec, **{SHARED: 0, SCALING: 1.0})


@pytest.mark.parametrize(
    ("field", "value"),
    [(SHARED, 8), (SHARED, 1.0), (SCALING, 2.5), (SCALING, 0), ("moe_router_num_groups", 0)],
)
def test_any_other_value_is_another_model(field: str, value: float) -> None:
    spec = spec_from_hf_config(published_config("qwen3-30b-a3b"))
    with pytest.raises(RuntimeError, match=field):
        check(spec, **{field: value})


def test_a_model_that_has_them_needs_them() -> None:
    spec = spec_from_hf_config(published_config("deepseek-v3"))
    check(spec)
    for field, value in ((SHARED, 0), (SHARED, None), (SCALING, 1.0), (SCALING, None)):
        with pytest.raises(RuntimeError, match=field):
            check(spec, **{field: value})
