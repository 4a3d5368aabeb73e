"""When numbers of a run are an alarm, what it does then, and that usual runs give none."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed_rl.core.alarms import (
    LEAST_RECENT,
    RECENT,
    RULES,
    Alarms,
    GradientWatch,
    History,
    Rule,
    chosen_rules,
    judge,
    not_finite,
)
from mindspeed_rl.core.errors import UsageError

PAGE = Path(__file__).resolve().parents[3] / "docs" / "alarms.md"
RULE = {rule.name: rule for rule in RULES}


def alarmed(rule: Rule, values: list[float]) -> list[int]:
    """Places of the values that are an alarm."""
    history = History()
    return [i for i, value in enumerate(values) if judge(rule, history, value)]


def test_a_spike_is_told_when_it_begins_and_not_before_enough_is_known() -> None:
    rule = RULE["loss-spike"]
    usual = [0.2, -0.1, 0.3, -0.2] * 3
    assert alarmed(rule, [*usual, 9.0, -11.0, -12.0, 0.1, 11.0]) == [13, 16]
    assert alarmed(rule, [*usual[: LEAST_RECENT - 1], 100.0]) == []
    assert alarmed(rule, [*usual[:LEAST_RECENT], 100.0]) == [LEAST_RECENT]


def test_what_is_small_is_no_spike() -> None:
    """However much smaller it was before: below the floor all is usual."""
    rule = RULE["grad-norm"]
    assert alarmed(rule, [0.0] * 20 + [3.9]) == []
    assert alarmed(rule, [0.0] * 20 + [4.1]) == [20]


def test_a_new_level_becomes_usual() -> None:
    rule = RULE["length-explosion"]
    assert alarmed(rule, [100.0] * RECENT + [251.0] + [260.0] * 200) == [RECENT]


def test_growth_over_thousands_of_steps_is_no_explosion() -> None:
    assert alarmed(RULE["length-explosion"], [100.0 * 1.002**i for i in range(2000)]) == []


def test_entropy_collapses_against_the_first_steps_and_for_some_steps() -> None:
    rule = RULE["entropy-collapse"]
    start, low = [2.0, 1.8, 2.2, 1.9, 2.1], 2.0 / 201
    assert alarmed(rule, [*start, *[low] * 9, 1.0, *[low] * 9]) == []
    assert alarmed(rule, [*start, *[low] * 12]) == [14]
    assert alarmed(rule, [*start, *[2.0 / 199] * 50]) == []
    assert alarmed(rule, [*start, *[0.0] * 12]) == [14]


def test_cut_responses_are_told_after_ten_steps() -> None:
    assert alarmed(RULE["truncation"], [0.96] * 9 + [0.9] + [1.0] * 12) == [19]


@pytest.mark.parametrize("norm", [math.nan, math.inf, -math.inf])
def test_an_update_by_no_numbers_is_an_alarm_at_once_and_is_forgotten(norm: float) -> None:
    watch = GradientWatch()
    assert watch.see(RULE, 1.0) is None
    alarm = watch.see(RULE, norm)
    assert alarm is not None and alarm.rule.action == "stop"
    assert watch.finite.recent == [1.0] and watch.size.recent == [1.0]


def test_skipped_updates_in_a_row_are_counted_and_each_is_told() -> None:
    rules = chosen_rules(["nonfinite=skip", "grad-norm:4=skip"])
    watch, usual = GradientWatch(), [1.0] * LEAST_RECENT
    for norm in usual:
        assert watch.see(rules, norm) is None
    told = [watch.see(rules, norm) for norm in (math.nan, 5.0, 6.0, math.inf)]
    assert [t.rule.name for t in told if t] == ["nonfinite", "grad-norm", "grad-norm", "nonfinite"]
    assert watch.skipped == 4
    assert watch.see(rules, 1.0) is None and watch.skipped == 0


def test_a_warning_is_no_skip() -> None:
    watch = GradientWatch()
    told = [watch.see(RULE, norm) for norm in [1.0] * LEAST_RECENT + [41.0, 42.0]]
    assert [bool(t) for t in told] == [False] * LEAST_RECENT + [True, False]
    assert watch.skipped == 0


def test_a_resumed_run_judges_as_the_whole_one() -> None:
    values = [{"policy/entropy": v, "response/length_mean": 9.0 + v} for v in (2.0, 1.5, 2.5)]
    values += [{"policy/entropy": 1e-4}] * 20 + [{"response/length_mean": 99.0}]
    rules = chosen_rules(["entropy-collapse:5=stop"])
    values = [*values[:3], *values[:3], *values[3:], {"response/length_mean": 12.0}] * 2
    whole, half = Alarms(rules), Alarms(rules)
    expected = [[a.text for a in whole.see(v)] for v in values]
    for v in values[:12]:
        half.see(v)
    resumed = Alarms(rules, json.loads(json.dumps(half.state_dict())))
    assert [[a.text for a in resumed.see(v)] for v in values[12:]] == expected[12:]
    assert sum(map(len, expected[12:])) >= 2

    watch = GradientWatch()
    for norm in (1.0, 2.0, math.nan):
        watch.see(chosen_rules(["nonfinite=skip"]), norm)
    again = GradientWatch.from_state(json.loads(json.dumps(watch.state_dict())))
    assert again == watch and again.skipped == 1


def test_a_step_that_measured_nothing_is_not_judged() -> None:
    alarms = Alarms(RULE)
    for _ in range(30):
        assert alarms.see({"policy/entropy": math.nan}) == []
    assert alarms.state_dict()["entropy-collapse"]["recent"] == []


@pytest.mark.parametrize("metric", ["loss/policy", "loss/kl", "policy/entropy"])
def test_a_metric_that_stops_being_a_number_is_told_once(metric: str) -> None:
    alarms = Alarms(chosen_rules(["entropy-collapse=stop"]))
    values = [math.nan, 0.5, 0.25, math.nan, math.nan, 0.5, math.nan]
    told = [alarms.see({metric: v, "value/loss": math.nan}) for v in values[:5]]
    alarms = Alarms(alarms_rules := chosen_rules([]), json.loads(json.dumps(alarms.state_dict())))
    told += [alarms.see({metric: v}) for v in values[5:]]
    assert [len(alarm) for alarm in told] == [0, 0, 0, 1, 0, 0, 1]
    assert f"{metric} is NaN, it was 0.25" in told[3][0].text
    assert told[3][0].rule.patience == 1, "a rollback goes back behind this step alone"
    off = Alarms({n: replace(r, action="off") for n, r in alarms_rules.items()})
    assert not any(off.see({metric: v}) for v in values)


def test_bounds_and_actions_of_the_flag() -> None:
    rules = chosen_rules(["grad-norm:5=skip", "truncation=off", "mismatch-drift=stop"])
    assert (rules["grad-norm"].bound, rules["grad-norm"].action) == (5.0, "skip")
    assert rules["mismatch-drift"].action == "stop"
    assert alarmed(rules["truncation"], [1.0] * 50) == []
    others = {"grad-norm", "truncation", "mismatch-drift"}
    assert all(rules[name] == rule for name, rule in RULE.items() if name not in others)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("grad-nrom=skip", "names are nonfinite, grad-norm"),
        ("grad-norm", "NAME=ACTION"),
        ("grad-norm=halt", "actions are off, warn, skip, rollback, stop"),
        ("loss-spike=skip", "known after the update"),
        ("nonfinite=warn", "destroys the weights"),
        ("nonfinite:3=skip", "has no bound"),
        ("dead-rewards:7=stop", "--reward-constant-steps"),
        ("grad-norm:x=stop", "a number above 0"),
        ("grad-norm:-1=stop", "a number above 0"),
        ("grad-norm:nan=stop", "a number above 0"),
    ],
)
def test_what_a_rule_cannot_do_is_refused(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=re.escape(told)) as error:
        chosen_rules([text])
    assert f"--rl-alarms {text}" in str(error.value)
    with pytest.raises(UsageError, match="each name once"):
        chosen_rules(["truncation=off", "truncation=stop"])


def test_the_page_has_the_rules() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| ([^|]+) \| ([^|]+) \| (\w+) \|", PAGE.read_text(), re.M)
    assert [row[0] for row in rows] == list(RULE)
    for name, metric, bound, action in rows:
        rule = RULE[name]
        assert rule.metric in metric.replace("`", ""), name
        assert action == rule.action, name
        if rule.signal is not not_finite and not rule.bound_flag:
            assert bound.startswith(f"{rule.bound:g} "), name
        assert rule.bound_flag in bound, name
        assert rule.patience == 1 or f"{rule.patience} steps" in bound, name


def test_only_numbers_that_are_known_before_the_update_skip_it() -> None:
    assert {rule.name for rule in RULES if rule.can_skip} == {"nonfinite", "grad-norm"}
