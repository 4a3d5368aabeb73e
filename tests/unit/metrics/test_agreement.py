"""When a run warns of a mismatch with its engine, and when it ends."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed_rl.core import agreement
from mindspeed_rl.core.agreement import AgreementBounds, agreement_bounds, unlike_precisions
from mindspeed_rl.metrics.agreement import EngineAgreement, check_difference

PAGE = Path(__file__).resolve().parents[3] / "docs" / "mismatch.md"
BOUNDS = AgreementBounds(0.05, 0.2)


def warned(seen: EngineAgreement, means: list[float], start: int = 1) -> list[int]:
    """Steps with a warning."""
    return [step for step, mean in enumerate(means, start) if seen.see(step, mean)]


def test_a_run_warns_before_it_ends() -> None:
    assert check_difference("here", 0.05, BOUNDS) == ""
    told = check_difference("here", 0.06, BOUNDS)
    assert "0.06" in told and "0.05" in told and "0.2" in told
    for mean in (0.21, math.inf, math.nan):
        with pytest.raises(RuntimeError, match=r"--rl-sync-check-tol 0\.2"):
            check_difference("here", mean, BOUNDS)


def test_unlike_precisions_are_named_before_the_engine_is_blamed() -> None:
    unlike = unlike_precisions(trainer_bf16=False, engine_bf16=True)
    mixed = replace(BOUNDS, unlike=unlike)
    with pytest.raises(RuntimeError, match="trainer computes in fp32 and the engine in bf16") as e:
        check_difference("here", 0.21, mixed)
    assert "something else" not in str(e.value) and "--rollout-dtype" in str(e.value)
    assert "trainer computes in fp32" in check_difference("here", 0.06, mixed)
    with pytest.raises(RuntimeError, match="computes something else"):
        check_difference("here", 0.21, BOUNDS)
    with pytest.raises(RuntimeError, match="not finite") as e:
        check_difference("here", math.nan, mixed)
    assert "fp32" not in str(e.value)
    assert unlike_precisions(trainer_bf16=True, engine_bf16=True) == ""


def test_later_steps_are_compared_with_the_first_five() -> None:
    """With their median, so that one step out of the ordinary does not hide a change."""
    seen = EngineAgreement(BOUNDS)
    assert warned(seen, [0.01, 0.012, 0.04, 0.009, 0.01]) == []
    assert warned(seen, [0.029, 0.031, 0.032, 0.02, 0.045], start=6) == [7, 10]
    assert "0.045" in EngineAgreement(BOUNDS, seen.first).see(11, 0.045)


def test_the_first_steps_are_within_the_bounds_as_well() -> None:
    seen = EngineAgreement(BOUNDS)
    assert warned(seen, [0.06, 0.07, 0.01, 0.06]) == [1, 4], "once for steps in a row"
    with pytest.raises(RuntimeError, match="step 5"):
        seen.see(5, 0.3)


def test_rounding_that_grows_is_no_news() -> None:
    """Below a tenth of what is expected, however small it was before."""
    seen = EngineAgreement(agreement.FP32, [0.0, 0.0, 3e-8, 0.0, 0.0])
    assert warned(seen, [2e-7, 2.9e-5, 3.1e-5]) == [3]


def test_a_run_goes_on_with_the_first_steps_of_the_one_that_was_saved() -> None:
    whole, half = EngineAgreement(BOUNDS), EngineAgreement(BOUNDS)
    means = [0.01, 0.011, 0.012, 0.009, 0.01, 0.02, 0.04]
    warned(half, means[:3])
    resumed = EngineAgreement(BOUNDS, half.first)
    assert warned(whole, means) == warned(resumed, means[3:], start=4) == [7]


def test_bounds_are_those_of_the_page() -> None:
    """Of every precision and kind of model."""
    kinds = {
        "fp32": agreement_bounds(bf16=False, experts=True, latent_attention=True),
        "bf16, dense": agreement_bounds(bf16=True, experts=False, latent_attention=False),
        "bf16, latent attention": agreement_bounds(bf16=True, experts=False, latent_attention=True),
        "bf16, experts": agreement_bounds(bf16=True, experts=True, latent_attention=True),
    }
    for kind, bounds in kinds.items():
        row = re.search(rf"^\| {kind} \| ([\d.e-]+) \| ([\d.e-]+) \|", PAGE.read_text(), re.M)
        assert row, kind
        assert (float(row[1]), float(row[2])) == (bounds.expected, bounds.limit), kind


@pytest.mark.parametrize(("asked", "expected"), [(0.5, 0.15), (0.01, 0.01)])
def test_the_limit_that_was_asked_for_ends_the_run(asked: float, expected: float) -> None:
    bounds = agreement_bounds(bf16=True, experts=True, latent_attention=False, limit=asked)
    assert (bounds.expected, bounds.limit) == (expected, asked)
    assert (
        agreement_bounds(bf16=False, experts=False, latent_attention=False, limit=0.5).limit == 0.5
    )
