"""Order and form of metrics for people."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from mindspeed_rl.metrics.names import format_fields, format_number, in_order


def test_people_find_the_headline_first_and_memory_last() -> None:
    mixed = (
        "exchange/sent_bytes", "memory/idle_used_bytes", "time/step_s", "reward/max", "loss/policy",
        "mismatch/k1", "reward/mean", "response/length_mean", "run/restarts", "optimizer/lr",
    )  # fmt: skip
    assert list(in_order(dict.fromkeys(mixed, 1.0))) == [
        *("reward/mean", "response/length_mean", "loss/policy", "time/step_s"),
        *("reward/max", "optimizer/lr", "mismatch/k1", "exchange/sent_bytes", "run/restarts"),
        "memory/idle_used_bytes",
    ]


@given(st.dictionaries(st.text(), st.floats(allow_nan=False)))
def test_an_order_loses_no_value(values: dict[str, float]) -> None:
    assert in_order(values) == values


def test_large_numbers_are_integers() -> None:
    assert format_fields({"tokens/s": 10031.4, "step_s": 9002.0}) == "tokens/s 10031 | step_s 9002"
    assert [format_number(x) for x in (0.00012346, -12345.6, 999.94, float("nan"))] == [
        *("0.0001235", "-12346", "999.9", "nan")
    ]


def test_a_reward_that_no_sample_has_is_no_number() -> None:
    """A gradient norm that is NaN stays in sight."""
    fields = {"reward": math.nan, "grad_norm": math.nan, "kl": 0.5}
    assert format_fields(fields) == "reward - | grad_norm nan | kl 0.5"
