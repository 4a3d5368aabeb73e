"""The reward functions, their names on the command line, and scoring in one process."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.rewards_support import settings

from mindspeed_rl.config.reward_spec import BUILT_IN_REWARDS
from mindspeed_rl.config.rewards import fields_of
from mindspeed_rl.rewards import (
    RewardRequest,
    RewardSettings,
    RewardSpec,
    WeightedReward,
    extract_last_number,
    lenient_match,
    resolve_reward,
    row_weights,
    score_sample,
)
from mindspeed_rl.rewards.registry import verdicts


def request(response: str = "", answer: str = "", **fields: object) -> RewardRequest:
    values: dict[str, object] = {
        "sample_id": 7,
        "prompt": "question",
        "response": response,
        "answer": answer,
        "finish_reason": "stop",
        "num_response_tokens": 3,
    }
    return RewardRequest(**{**values, **fields})  # type: ignore[arg-type]


# ---- math, exact_match ---------------------------------------------------------------------------

MATH_CASES = [
    ("42", r"so it is \boxed{42}", 1.0),
    ("42", "so it is 42.", 1.0),
    ("42", "3 + 4 = 42", 1.0),
    ("42", "42 is wrong, I say 41", 0.0),
    ("5", r"\boxed{15}", 0.0),  # no substring test
    ("42", r"\boxed{41}, not 42", 0.0),  # the box wins over the last number
    ("1,234", "it is 1234", 1.0),
    ("1/2", r"\boxed{\frac{1}{2}}", 1.0),
    (r"\frac{1}{2}", "0.5", 1.0),
    ("2x+1", r"\boxed{1 + 2x}", 1.0),
    ("2x+1", "2", 0.0),  # the reference is the expression, not its first number
    ("$x^2$", r"$x \cdot x$", 1.0),
    (r"\boxed{7}", "7", 1.0),
    ("$5", "5", 1.0),
    ("(1,2)", r"\boxed{(1,2)}", 1.0),
    ("42", "", 0.0),
    ("42", "I do not know", 0.0),
    ("42", r"\boxed{", 0.0),
]


@pytest.mark.parametrize(("answer", "response", "expected"), MATH_CASES)
def test_math_reward(answer: str, response: str, expected: float) -> None:
    assert resolve_reward("math")(request(response, answer)) == expected


@pytest.mark.parametrize("answer", ["", "   ", "$$"])
def test_math_reward_refuses_an_unreadable_reference(answer: str) -> None:
    with pytest.raises(ValueError, match="sample 7"):
        resolve_reward("math")(request("7", answer))


def test_math_reward_does_not_log_that_limits_are_off(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        resolve_reward("math")(request("7", "7"))
    assert caplog.records == []


@pytest.mark.parametrize(
    ("response", "expected"), [("a b", 1.0), (" a b\n", 1.0), ("a  b", 0.0), ("a b.", 0.0)]
)
def test_exact_match(response: str, expected: float) -> None:
    assert resolve_reward("exact_match")(request(response, "a b ")) == expected


# ---- numeric_match, length -----------------------------------------------------------------------


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
    with pytest.raises(ValueError, match="'forty' of sample 7"):
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


# ---- format, lenient extraction ------------------------------------------------------------------

THINK = r"<think>.*</think> *[0-9]+"


@pytest.mark.parametrize(
    ("response", "finish_reason", "metadata", "expected"),
    [
        ("anything", "stop", {}, 1.0),
        ("anything", "length", {}, 0.0),
        ("<think>a\nb</think> 4", "stop", {"format_regex": THINK}, 1.0),
        ("<think>a\nb</think> 4", "length", {"format_regex": THINK}, 0.0),
        ("<think>a</think> 4.", "stop", {"format_regex": THINK}, 0.0),
        ("so <think>a</think> 4", "stop", {"format_regex": THINK}, 0.0),
    ],
)
def test_format_reward(
    response: str, finish_reason: str, metadata: dict[str, str], expected: float
) -> None:
    sample = request(response, finish_reason=finish_reason, metadata=metadata)
    assert resolve_reward("format")(sample) == expected


@pytest.mark.parametrize("pattern", ["(", 3])
def test_format_reward_refuses_a_bad_pattern(pattern: object) -> None:
    with pytest.raises(ValueError, match=r"'format_regex' of sample 7"):
        resolve_reward("format")(request(metadata={"format_regex": pattern}))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("none", None),
        ("first 3 then 4.", "4"),
        ("3-4", "4"),
        ("(3)-4", "4"),
        ("x = -4", "-4"),
        ("-4", "-4"),
        ("1,234.50 dollars", "1234.50"),
        ("1,234,567", "1234567"),
        ("12,3456", "3456"),
        ("2, 3", "3"),
        ("is .5", ".5"),
        ("1.2.3", "3"),
        ("0042!", "0042"),
        (r"\boxed{17}", "17"),
    ],
)
def test_extract_last_number(text: str, expected: str | None) -> None:
    assert extract_last_number(text) == expected


@given(st.decimals(-(10**9), 10**9, places=2), st.text(alphabet="ab =:\n$", max_size=20))
def test_extract_last_number_finds_any_decimal(number: Decimal, noise: str) -> None:
    found = extract_last_number(f"3 of {noise} {number:,}{noise}")
    assert found is not None and Decimal(found) == number


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("The answer is 7.", "7", True),
        ("7 then 8", "7", False),
        ("it is 7.0", "7", True),
        ("it is 1234", "1,234", True),
        ("17", "7", False),
        ("so 0123", "0123", True),
        ("so 123", "0123", False),  # a digit string, not a number
        ("so 0.5", ".5", True),
        ("-3", "3", False),
        (" Paris ", "Paris", True),
        ("it is Paris", "Paris", False),
        ("", "7", False),
    ],
)
def test_lenient_match(response: str, answer: str, expected: bool) -> None:
    assert lenient_match(response, answer) is expected


# ---- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "weight", "label"),
    [
        ("math", "math", 1.0, "math"),
        (" format=0.2 ", "format", 0.2, "format"),
        ("length=-1e-3", "length", -0.001, "length"),
        ("my/file.py:score", "my/file.py:score", 1.0, "score"),
        ("my/file.py:score=0.8", "my/file.py:score", 0.8, "score"),
        ("a=b/file.py:score=1", "a=b/file.py:score", 1.0, "score"),
        ("math:0.8", "math", 0.8, "math"),
        ("my/file.py:score:0.5", "my/file.py:score", 0.5, "score"),
    ],
)
def test_spec_syntax(text: str, name: str, weight: float, label: str) -> None:
    spec = RewardSpec.parse(text)
    assert (spec.name, spec.weight, spec.label) == (name, weight, label)


@pytest.mark.parametrize("text", ["", "=1", "math=", "math=a", "math=nan", "math=inf"])
def test_bad_spec_syntax(text: str) -> None:
    with pytest.raises(ValueError, match="reward"):
        RewardSpec.parse(text)


def test_unknown_reward_names_the_known_and_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"--reward-function fromat: .*'format'"):
        resolve_reward("fromat")


def test_every_built_in_reward_has_a_description_and_a_function() -> None:
    """A module of ``rewards/builtin`` is all that a built-in reward is."""
    flags = settings("math", remote_url="http://server", length_target=1)
    for name, what in BUILT_IN_REWARDS.items():
        assert what and callable(resolve_reward(name, replace(flags, max_response_tokens=2)))


def test_verdicts_in_the_order_of_their_trust() -> None:
    assert verdicts() == ("math", "code", "environment", "numeric_match", "exact_match")


def test_user_function_by_file_with_a_neighbour(tmp_path: Path) -> None:
    (tmp_path / "reward_test_neighbour.py").write_text("FACTOR = 3\n")
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "from reward_test_neighbour import FACTOR\n"
        "@dataclass\n"
        "class Score:\n"
        "    value: float\n"
        "def triple(request):\n"
        "    return Score(FACTOR * len(request.response)).value\n"
        "def answer_length(request):\n"
        "    return len(request.answer)\n"
    )
    triple = resolve_reward(f"{file}:triple")
    assert triple(request("abc")) == 9
    other = resolve_reward(RewardSpec(f"{file}:answer_length", 0.5))
    assert other(request(answer="ab")) == 2
    assert triple.__module__ == other.__module__  # the file is executed once


@pytest.mark.parametrize(
    ("source", "function", "message"),
    [
        (None, "score", "no Python file"),
        ("def other(request): return 1\n", "score", r"defines no 'score'; its functions: other"),
        ("score = 3\n", "score", "is a int, must be a function"),
        ("def score(): return 1\n", "score", "exactly one argument"),
        ("def score(a, b): return 1\n", "score", "exactly one argument"),
        ("async def score(request): return 1\n", "score", "is async"),
        ("import no_such_module_here\n", "score", "fails to import: ModuleNotFoundError"),
        ("def score(:\n", "score", "fails to import: SyntaxError"),
    ],
)
def test_bad_user_files(tmp_path: Path, source: str | None, function: str, message: str) -> None:
    file = tmp_path / "mine.py"
    if source is not None:
        file.write_text(source)
    with pytest.raises(ValueError, match=message) as caught:
        resolve_reward(f"{file}:{function}")
    assert "mine.py" in str(caught.value)


# ---- rows that name their rewards ----------------------------------------------------------------

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
    with pytest.raises(ValueError, match="--reward-key 'rewards'"):
        row_weights(WEIGHTS, {"rewards": value})


def test_only_the_rewards_of_the_row_are_called() -> None:
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


# ---- scoring -------------------------------------------------------------------------------------


def constant(value: object, label: str = "f", weight: float = 1.0) -> WeightedReward:
    return WeightedReward(label, weight, lambda sample: value)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("value", [True, False, 0, 3, -2.5, 1e300, Fraction(1, 2)])
def test_accepted_values(value: float) -> None:
    result = score_sample([constant(value)], request())
    assert (result.status, result.reward, result.parts) == ("ok", float(value), {"f": float(value)})
    assert type(result.reward) is float


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, "1", [1.0], (1.0,), {}, 1j, Decimal(1), object()]
)
def test_refused_values(value: object) -> None:
    """What is not a finite number is an error that names the function and the value."""
    result = score_sample([constant(0.5, "good"), constant(value, "bad")], request())
    assert (result.status, result.reward) == ("error", None)
    assert "reward 'bad' returned" in result.detail and repr(value) in result.detail


def test_weighted_sum_and_abstention() -> None:
    """``None`` abstains; the total is ``None`` only when all abstain."""
    rewards = [constant(1.0, "a", 0.5), constant(None, "b", 9.0), constant(2, "c", -1.0)]
    result = score_sample(rewards, request())
    assert (result.reward, result.parts) == (-1.5, {"a": 1.0, "c": 2.0})
    nothing = score_sample([constant(None), constant(None, "g")], request())
    assert (nothing.status, nothing.reward, nothing.parts) == ("ok", None, {})


@pytest.mark.parametrize("error", [RuntimeError("boom"), SystemExit(3), GeneratorExit()])
def test_what_a_function_raises_is_an_error_with_its_traceback(error: BaseException) -> None:
    """An exception is not a 0, whatever its base class."""

    def fails(sample: RewardRequest) -> float:
        raise error

    result = score_sample([constant(1.0, "a"), WeightedReward("b", 1.0, fails)], request())
    assert (result.status, result.reward, result.sample_id) == ("error", None, 7)
    assert "in fails" in result.detail and type(error).__name__ in result.detail


def test_a_flag_belongs_to_the_reward_with_the_longest_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(BUILT_IN_REWARDS, "code_allow_open", "A reward that begins like another.")
    assert [field.name for field in fields_of("code_allow_open")] == []
    monkeypatch.setitem(BUILT_IN_REWARDS, "code_time", "A reward that begins like another.")
    assert [field.name for field in fields_of("code_time")] == ["reward_code_time_limit_s"]
    of_code = {field.name for field in fields_of("code")}
    assert "reward_code_allow_open" in of_code and "reward_code_time_limit_s" not in of_code
