"""Engine flags in vLLM-Ascend's terms: every key is one that the pinned version reads."""

from __future__ import annotations

from typing import Any

import pytest
from support.ascend_api import snapshot

from mindspeed_rl.config import EngineTuningConfig
from mindspeed_rl.engines.vllm_ascend.arguments import ENVIRONMENT, ascend_arguments

ALWAYS = {
    "enforce_eager": True,
    "additional_config.weight_nz_mode": 0,
    "additional_config.enable_cpu_binding": False,
    "additional_config.refresh": True,
    "additional_config.enable_flashcomm1": False,
    "additional_config.dp_allreduce_on_npu": True,
}
_COMPILED = "compilation_config.cudagraph_mode"
CASES: list[tuple[dict[str, Any], tuple[int, ...], dict[str, object]]] = [
    ({}, (), {}),
    *(
        ({"rollout_graph_mode": mode}, (), {"enforce_eager": False, _COMPILED: name})
        for mode, name in (("piecewise", "PIECEWISE"), ("full-and-piecewise", "FULL_AND_PIECEWISE"))
    ),
    (
        {"rollout_graph_mode": "full-decode"},
        (8, 64),
        {
            "enforce_eager": False,
            _COMPILED: "FULL_DECODE_ONLY",
            "compilation_config.cudagraph_capture_sizes": [8, 64],
        },
    ),
    *(
        ({f"rollout_{flag}": value}, (), {key: found})
        for flag, value, key, found in (
            ("multistream_moe", True, "additional_config.multistream_overlap_shared_expert", True),
            ("flashcomm", True, "additional_config.enable_flashcomm1", True),
            ("chunked_prefill", "off", "enable_chunked_prefill", False),
            ("chunked_prefill", "on", "enable_chunked_prefill", True),
        )
    ),
    ({"rollout_dp_sync": "packed"}, (), {}),
]


def tuning(**flags: Any) -> EngineTuningConfig:
    """With a graph mode, as every engine has one."""
    return EngineTuningConfig(**{"rollout_graph_mode": "eager", **flags})


def paths(value: object, prefix: str = "") -> dict[str, object]:
    """Nested arguments by dotted path."""
    if not isinstance(value, dict):
        return {prefix: value}
    found: dict[str, object] = {}
    for key, inner in value.items():
        found |= paths(inner, f"{prefix}.{key}" if prefix else key)
    return found


@pytest.mark.parametrize(("flags", "sizes", "expected"), CASES, ids=lambda v: str(v))
def test_a_flag_sets_its_key_and_nothing_else(
    flags: dict[str, Any], sizes: tuple[int, ...], expected: dict[str, object]
) -> None:
    assert paths(ascend_arguments(tuning(**flags), sizes)) == ALWAYS | expected


def test_only_a_map_with_copies_is_given_to_the_engine() -> None:
    """It makes room for them; other maps are set in its tables after it was built."""
    mapped = tuning(rollout_expert_map="m.json")
    assert paths(ascend_arguments(mapped)) == ALWAYS
    key = "additional_config.eplb_config.expert_map_path"
    assert paths(ascend_arguments(mapped, copies=True)) == ALWAYS | {key: "m.json"}


def test_the_engines_own_agreement_is_left_alone() -> None:
    found = paths(ascend_arguments(tuning(rollout_dp_sync="engine")))
    assert found.keys() == ALWAYS.keys() - {"additional_config.dp_allreduce_on_npu"}


def test_every_key_is_read_by_the_pinned_version() -> None:
    """Against the keys and arguments in its sources: it says nothing of keys it does not know."""
    read = snapshot()["settings"]
    used = {path for flags, sizes, _ in CASES
            for path in paths(ascend_arguments(tuning(**flags), sizes, copies=True))}  # fmt: skip
    for path in sorted(used):
        top, _, rest = path.partition(".")
        if top == "additional_config":
            assert {*rest.split(".")} <= {*read["additional_config"]}, path
        elif top == "compilation_config":
            assert rest in read["CompilationConfig"], path
        else:
            assert path in read["EngineArgs"], path
    assert set(ENVIRONMENT) <= set(read["environment"])
