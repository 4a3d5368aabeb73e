"""The built-in rewards besides math, and which of them score a row."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.rewards_support import settings

from mindspeed_rl.rewards import (
    RewardRequest,
    RewardSettings,
    RewardSpec,
    WeightedReward,
    resolve_reward,
    row_weights,
    score_sample,
)


def request(response: str = "", answer: str = "", **fields: Any) -> RewardRequest:
    values = {"finish_reason": "stop", "num_response_tokens": 4, "metadata": {}} | fields
    return RewardRequest(7, "question", response, answer, **values)


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("it is 1,234.50.", "1234.5", 1.0),
        ("3-4", "-4", 0.0),
        ("about 6.02e23", "6.02E+23", 1.0),
        ("1.0000001", "1", 1.0),
        ("1.00001", "1", 0.0),
        ("12 or 13", "12", 0.0),
        ("no number", "0", 0.0),
        ("1e999", "1e999", 1.0),
        ("1e999", "5", 0.0),
    ],
)
def test_numbers_are_compared_by_value(response: str, answer: str, expected: float) -> None:
    assert resolve_reward("numeric_match")(request(response, answer)) == expected


def test_the_tolerance_is_relative_and_from_the_row() -> None:
    function = resolve_reward("numeric_match")
    assert function(request("1009", "1000", metadata={"tolerance": 0.01})) == 1.0
    assert function(request("1011", "1000", metadata={"tolerance": 0.01})) == 0.0
    assert function(request("0.009", "0", metadata={"tolerance": 0.01})) == 1.0
    for bad in (-1, "x", True, math.nan):
        with pytest.raises(ValueError, match="tolerance"):
            function(request("1", "1", metadata={"tolerance": bad}))
    with pytest.raises(ValueError, match=r"'forty' of sample 7 is not a number"):
        function(request("40", "forty"))


def limits(response: int, target: int) -> RewardSettings:
    return replace(settings("length", length_target=target), max_response_tokens=response)


def test_length_falls_from_the_target_to_the_limit() -> None:
    function = resolve_reward("length", limits(30, 10))
    rewards = [function(request(num_response_tokens=n)) for n in (1, 10, 15, 20, 30)]
    assert rewards == [1.0, 1.0, 0.75, 0.5, 0.0]
    assert function(request(finish_reason="length", num_response_tokens=5)) == 0.0
    with pytest.raises(ValueError, match="--reward-length-target 30"):
        resolve_reward("length", limits(30, 30))


def test_format_takes_the_flags_pattern_where_the_row_has_none() -> None:
    function = resolve_reward("format", settings("format", format_regex=r"<a>.*</a>"))
    assert [function(request(r)) for r in ("<a>x\ny</a>", "x")] == [1.0, 0.0]
    assert function(request("x", metadata={"format_regex": "x"})) == 1.0
    with pytest.raises(ValueError, match="--reward-format-regex"):
        resolve_reward("format", settings("format", format_regex="("))


def test_weights_may_follow_a_colon() -> None:
    texts = ("math:0.8", "math=0.8", "rewards.py:score", "rewards.py:score:0.5", "math")
    parsed = [RewardSpec.parse(text) for text in texts]
    assert [(s.name, s.weight) for s in parsed] == [
        ("math", 0.8), ("math", 0.8), ("rewards.py:score", 1.0), ("rewards.py:score", 0.5),
        ("math", 1.0),
    ]  # fmt: skip


WEIGHTS = {"math": 1.0, "format": 0.5, "code": 2.0}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, WEIGHTS),
        ("code", {"code": 2.0}),
        (["format", "math"], {"format": 0.5, "math": 1.0}),
        ({"math": 3, "format": 0.0}, {"math": 3.0, "format": 0.0}),
    ],
)
def test_a_row_names_its_rewards(value: object, expected: dict[str, float]) -> None:
    assert row_weights(WEIGHTS, {"rewards": value}) == expected
    assert row_weights(WEIGHTS, {"kind": value}, "kind") == expected


@pytest.mark.parametrize("value", ["maths", ["math", "x"], [], {"math": math.inf}, 3, {"x": 1}])
def test_a_row_with_other_rewards_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"--reward-key 'rewards' gives .*math, format, code"):
        row_weights(WEIGHTS, {"rewards": value})


def test_only_the_rewards_of_the_row_are_called(tmp_path: Path) -> None:
    """The others are missing from the parts, as if they had abstained."""
    rewards = [
        WeightedReward("one", 1.0, lambda r: 1.0),
        WeightedReward("half", 0.5, lambda r: 1.0),
        WeightedReward("raises", 1.0, lambda r: 1 / 0),
    ]
    found = score_sample(rewards, request(metadata={"rewards": {"one": 2.0, "half": 0.5}}))
    assert (found.reward, found.parts, found.status) == (2.5, {"one": 1.0, "half": 1.0}, "ok")
    wrong = score_sample(rewards, request(metadata={"rewards": "two"}))
    assert (wrong.reward, wrong.status) == (None, "error") and "'two'" in wrong.detail
