"""What recipes train on, per real token, with lengths as published for them."""

from __future__ import annotations

import sys

import pytest
from support.architecture import ROOT

sys.path.insert(0, str(ROOT / "tools"))

from bench.context_groups import measure as measure_context
from bench.packing import CASES, measure

# Measured by others with the earlier plan, every sample padded to the longest of the step.
PADDED = {"DeepSeek-R1": 1.91, "Qwen3-235B": 4.42, "Qwen3-30B": 2.68, "Qwen2.5-7B, 32K": 1.40}
MOST = 1.001  # rows are rounded up to the multiple that the kernels want


@pytest.mark.parametrize("name", CASES)
def test_recipes_train_on_hardly_more_than_the_tokens_of_their_samples(name: str) -> None:
    found = measure(CASES[name])
    assert 1.0 < found["now"] <= MOST, "below 1 a sample is not trained on"
    if name in PADDED:
        assert found["padded"] == pytest.approx(PADDED[name], rel=0.02)


@pytest.mark.parametrize("name", ["Qwen3-30B", "Qwen2.5-7B"])
@pytest.mark.parametrize("cp", [4, 8])
def test_hybrid_context_parallelism_exchanges_less_and_ends_earlier(name: str, cp: int) -> None:
    """By plans: ranks keep equal work, and at most 0.2 % more tokens travel."""
    found = measure_context(CASES[name], cp)
    static, hybrid = found["static"], found["hybrid"]
    assert hybrid["exchanged"] < 0.65 * static["exchanged"]
    assert hybrid["time"] - 1.0 < 0.7 * (static["time"] - 1.0), "over the floor"
    assert hybrid["busiest"] <= 1.002
    assert hybrid["travel"] <= 1.002 * static["travel"]
