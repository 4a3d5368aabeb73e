"""How often healthy runs give an alarm, and how soon one comes when numbers drift.

The model of a healthy run has the trends of a recorded one and more noise than it. In the recorded
quickstart the gradient norm was at most 5.8 times the median of the 32 steps before (in 192 steps);
log-normal noise of 0.6 reaches that in every third such run. One of two updates of a step of PPO,
of 500 steps, had 21 times the median, so that the bound is 40: 6 standard deviations of that noise.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl.core.alarms import GRADIENT_NORM, Alarms, GradientWatch, chosen_rules

RECORDED = Path(__file__).with_name("quickstart_metrics.json")
RUNS = json.loads(Path(__file__).with_name("quickstart_runs.json").read_text())["runs"]
STEPS, DRIFT = 500, 200
Series = dict[str, Any]


def told(series: Series) -> list[tuple[int, str]]:
    """Step and rule of every alarm of a run with these metrics."""
    rules = chosen_rules([])
    alarms, watch, found = Alarms(rules), GradientWatch(), []
    for step in range(len(series[GRADIENT_NORM])):
        values = {name: float(numbers[step]) for name, numbers in series.items()}
        if alarm := watch.see(rules, values[GRADIENT_NORM]):
            found.append((step, alarm.rule.name))
        found += [(step, alarm.rule.name) for alarm in alarms.see(values)]
    return found


def healthy(seed: int) -> Series:
    """Metrics of a run that learns: trends as recorded, and log-normal or normal noise."""
    draw = np.random.default_rng(seed)
    done = np.arange(STEPS) / STEPS
    noise = draw.standard_normal((6, STEPS))
    return {
        GRADIENT_NORM: 1.6 * 4.0**-done * np.exp(0.6 * noise[0]),
        "loss/policy": 0.05 * noise[1] * np.exp(0.5 * noise[2]),
        "policy/entropy": 1.9 * 18.0**-done * np.exp(0.2 * noise[3]),
        "response/length_mean": 7.0 * 4.0**done * np.exp(0.1 * noise[4]),
        "response/truncated_fraction": np.clip(0.6 * 0.1**done + 0.1 * noise[5], 0.0, 1.0),
    }


def test_the_recorded_quickstart_gives_no_alarm() -> None:
    recorded = json.loads(RECORDED.read_text())["metrics"]
    assert set(recorded) == set(healthy(0)) and len(recorded[GRADIENT_NORM]) == 200
    assert told(recorded) == []
    norms = np.array(recorded[GRADIENT_NORM])
    usual = [np.median(norms[max(0, i - 32) : i]) for i in range(8, 200)]
    assert 5.7 < max(norms[8:] / usual) < 5.9


@pytest.mark.parametrize("name", RUNS)
def test_recorded_runs_of_500_steps_give_no_alarm(name: str) -> None:
    """Their gradient norms were at most a quarter as far from usual as the bound allows."""
    assert len(RUNS[name][GRADIENT_NORM]) == STEPS
    assert told(RUNS[name]) == []
    norms = np.array(RUNS[name][GRADIENT_NORM])
    usual = [np.median(norms[max(0, i - 32) : i]) for i in range(8, STEPS)]
    assert 4.0 < max(norms[8:] / usual) < 10.0


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1))
def test_500_healthy_steps_give_no_alarm(seed: int) -> None:
    assert told(healthy(seed)) == []


def test_the_model_is_no_calmer_than_the_recorded_run() -> None:
    """Of 200 runs of the model, a third has gradient norms as far from usual within 192 steps."""
    worst = []
    for seed in range(200):
        norms = healthy(seed)[GRADIENT_NORM][:200]
        worst.append(max(norms[i] / np.median(norms[max(0, i - 32) : i]) for i in range(8, 200)))
    assert 0.2 < np.mean(np.array(worst) > 5.8) < 0.6 and max(worst) < 40.0


def grows(factor: float) -> Callable[[Any], Any]:
    """From the drift on a number is multiplied by a factor at every step."""
    return lambda numbers: numbers * factor ** np.maximum(0, np.arange(STEPS) - DRIFT + 1)


def becomes(value: float) -> Callable[[Any], Any]:
    return lambda numbers: np.where(np.arange(STEPS) >= DRIFT, value, numbers)


DRIFTS = {
    # Rule, metric, what happens from step 200 on, within how many steps it is told.
    "no gradient": ("nonfinite", GRADIENT_NORM, becomes(math.inf), 1),
    "gradients of an outlier": ("grad-norm", GRADIENT_NORM, becomes(60.0), 1),
    "growing gradients": ("grad-norm", GRADIENT_NORM, grows(1.4), 20),
    "loss spike": ("loss-spike", "loss/policy", becomes(-6.0), 1),
    "no loss": ("loss-spike", "loss/policy", becomes(math.nan), 1),
    "growing loss": ("loss-spike", "loss/policy", grows(1.7), 30),
    "entropy collapse": ("entropy-collapse", "policy/entropy", grows(0.8), 40),
    "policy that is sure": ("entropy-collapse", "policy/entropy", becomes(0.0), 10),
    "lengths at once": ("length-explosion", "response/length_mean", becomes(60.0), 1),
    "growing lengths": ("length-explosion", "response/length_mean", grows(1.1), 20),
    "all cut": ("truncation", "response/truncated_fraction", becomes(0.99), 10),
}


@pytest.mark.parametrize("name", DRIFTS)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_drift_is_told_in_time(name: str, seed: int) -> None:
    rule, metric, change, within = DRIFTS[name]
    series = healthy(seed)
    series[metric] = change(series[metric])
    series = {metric: numbers[: DRIFT + within] for metric, numbers in series.items()}
    found = told(series)
    assert found and {alarm for _, alarm in found} == {rule}
    assert DRIFT <= found[0][0] < DRIFT + within
