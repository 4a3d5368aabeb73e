"""What a run does when its numbers go wrong: it tells, skips the update, or stops."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rl_run import REWARDS, TablePolicy, TableRun, answering_run, make_run, state_at, value

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.metrics.metric_set import Max, Mean, MetricSet
from mindspeed_rl.rl.report import RunReporter
from mindspeed_rl.rl.rollouts import generate_rollouts
from mindspeed_rl.samples.store import PlacedSamples

TRACED = "traced to a layer"


@pytest.fixture(autouse=True)
def trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy of these runs is a table, which has no layers."""
    monkeypatch.setattr("mindspeed_rl.rl.update.trace_nonfinite", lambda *_: TRACED)


def broken_run(folder: Path, flags: str, monkeypatch: pytest.MonkeyPatch, at: float) -> TableRun:
    """A run whose second optimizer step has a gradient with ``at``."""
    run = make_run(folder, f"--global-batch-size 3 {flags}", REWARDS)
    passes, original = [0], TablePolicy.forward_backward

    def broken(self: TablePolicy, *args: Any) -> MetricSet:
        found = original(self, *args)
        passes[0] += 1
        if passes[0] == 2:
            assert self.table.grad is not None
            self.table.grad[5] = at
            found = found.merge({"policy/entropy": Mean(math.nan, 1.0)})
        return found

    monkeypatch.setattr(TablePolicy, "forward_backward", broken)
    return run


@pytest.mark.parametrize("at", [math.nan, math.inf])
def test_an_update_by_numbers_that_are_none_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: float
) -> None:
    """Before it is made, with the place where they begin."""
    run = broken_run(tmp_path, "", monkeypatch, at)
    batches = run.batches()
    with pytest.raises(FloatingPointError, match=f"step 1: alarm nonfinite: .*{TRACED}"):
        run.update(batches)
    assert len(run.policy.gradients) == 1 == run.state.version
    assert run.policy.table.isfinite().all()


def test_a_skipped_update_leaves_weights_and_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = broken_run(tmp_path, "--rl-alarms nonfinite=skip", monkeypatch, math.nan)
    batches = run.batches()
    metrics = run.update(batches)
    assert (run.state.version, run.state.gradients.skipped) == (1, 1)
    assert value(metrics, "optimizer/skipped") == 1.0
    assert math.isfinite(value(metrics, "policy/entropy")), "what it counted is left out"
    told = capsys.readouterr().out
    assert "warning: step 1: alarm nonfinite: optimizer/grad_norm is nan; " in told
    assert TRACED in told and "the update is skipped" in told
    run.update(batches)
    assert (run.state.version, run.state.gradients.skipped) == (3, 0)
    assert all(gradient.isfinite().all() for gradient in run.policy.gradients)


def test_a_run_whose_updates_are_all_skipped_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, "--rl-alarms nonfinite=skip", REWARDS)
    batches = run.batches()
    monkeypatch.setattr(TablePolicy, "gradient_norm", lambda _: math.inf)
    for step in range(1, 10):
        run.update(batches, step)
    with pytest.raises(RuntimeError, match="10 updates in a row were skipped"):
        run.update(batches, 10)
    assert run.state.version == 0


@pytest.mark.parametrize("action", ["warn", "skip", "stop"])
def test_a_gradient_out_of_range(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    action: str,
) -> None:
    run = make_run(tmp_path, f"--rl-alarms grad-norm:3={action}", REWARDS)
    batches = run.batches()
    norms = iter([1.0] * 8 + [3.5, 1.0])
    monkeypatch.setattr(TablePolicy, "gradient_norm", lambda _: next(norms))
    for step in range(1, 9):
        run.update(batches, step)
    if action == "stop":
        with pytest.raises(RuntimeError, match=r"step 9: alarm grad-norm: .* is 3\.5; .*=stop"):
            run.update(batches, 9)
        return
    run.update(batches, 9)
    assert run.state.version == (8 if action == "skip" else 9)
    assert "warning: step 9: alarm grad-norm" in capsys.readouterr().out
    run.update(batches, 10)
    assert run.state.version == (9 if action == "skip" else 10)


ROWS = (("42", "stop", "42"), ("7", "stop", "8"))
NOWHERE: Any = PlacedSamples([], [], [], None, MetricSet())  # type: ignore[arg-type]


def logged(run: Any, report: RunReporter, state: Any, entropies: list[float]) -> None:
    for entropy in entropies:
        state.step += 1
        found = {"policy/entropy": Mean(entropy, 1.0), "mismatch/max_abs_logprob": Max(1e-7)}
        report.log_step(generate_rollouts(run, state), MetricSet(found), NOWHERE)


def test_a_collapse_is_told_in_one_line_and_may_stop_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The step is logged before the run ends; what was seen goes into the checkpoint."""
    for action in ("warn", "stop"):
        folder = tmp_path / action
        folder.mkdir()
        flags = f"--rl-alarms entropy-collapse:50={action} --train-iters 30"
        run = answering_run(folder, ROWS, flags=flags)
        state = state_at()
        report = RunReporter(run, state)
        logged(run, report, state, [2.0] * 5 + [0.03] * 8)
        report = RunReporter(run, state, 13, json.loads(json.dumps(report.state_dict())))
        logged(run, report, state, [0.03])
        if action == "stop":
            with pytest.raises(RuntimeError, match=r"step 15: alarm entropy-collapse: .*=stop"):
                logged(run, report, state, [0.03])
            lines = (folder / "metrics.jsonl").read_text().splitlines()
            assert json.loads(lines[-1])["step"] == 15
        else:
            logged(run, report, state, [0.03] * 5)
            told = capsys.readouterr().out
            assert told.count("alarm entropy-collapse") == 1
            assert "warning: step 15: alarm entropy-collapse: policy/entropy is 0.03" in told


@pytest.mark.parametrize(("action", "stops"), [("stop", True), ("off", False)])
def test_rewards_that_never_differ_obey_the_rule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], action: str, stops: bool
) -> None:
    flags = f"--reward-constant-steps 2 --rl-alarms dead-rewards={action}"
    run = answering_run(tmp_path, ROWS[:1], flags=flags)
    state = state_at()
    report = RunReporter(run, state)
    logged(run, report, state, [1.0])
    if stops:
        with pytest.raises(RuntimeError, match=r"step 2: rewards: .*dead-rewards=stop"):
            logged(run, report, state, [1.0])
    else:
        logged(run, report, state, [1.0])
        assert "rewards:" not in capsys.readouterr().out


def test_a_rule_that_is_never_counted_cannot_stop_a_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--reward-constant-steps 0 never counts"):
        make_run(tmp_path, "--reward-constant-steps 0 --rl-alarms dead-rewards=stop")
    with pytest.raises(UsageError, match="--rl-alarms loss-spike=skip"):
        make_run(tmp_path, "--rl-alarms loss-spike=skip")


def test_no_alarm_in_the_numbers_of_a_usual_run(tmp_path: Path) -> None:
    """A gradient norm of 0 for some steps, as of groups with equal rewards, is none."""
    run = make_run(tmp_path, "--rl-alarms grad-norm=stop", dict.fromkeys(range(6), 1.0))
    batches = run.batches()
    for step in range(1, 20):
        run.update(batches, step)
    assert torch.equal(run.policy.gradients[0], torch.zeros_like(run.policy.gradients[0]))
