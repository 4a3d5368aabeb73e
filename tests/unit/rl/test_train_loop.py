"""The loop of train_rl on a run whose models are tables: what happens in which step.

One prompt group a step would do; what counts is the order of evaluations, warm-up and updates.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.rl_run import REWARDS, TableRun, make_run

from mindspeed_rl import train_rl
from mindspeed_rl.generation.evaluate import Evaluation
from mindspeed_rl.rl import report as rl_report


def train(run: TableRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps, without the export and the curves of the end."""
    monkeypatch.setattr(rl_report.RunReporter, "finish", lambda self, models: None)
    train_rl.train(run.parts)


def test_the_critic_alone_is_trained_in_the_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of four steps: the policy makes the two updates of the last one."""
    flags = "--rl-advantage-estimator gae --critic-warmup-steps 3 --global-batch-size 3"
    run = make_run(tmp_path, flags, REWARDS)
    train(run, monkeypatch)
    assert len(run.critic.gradients) == 4 * 2
    assert len(run.policy.gradients) == 2 == run.engine.weights_version


def test_an_evaluation_is_of_the_weights_after_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step and after every second; each step makes two updates."""
    run = make_run(tmp_path, "--train-iters 5 --eval-interval 2 --global-batch-size 3", REWARDS)
    run.parts.data.held_out[""] = run.parts.data.train
    seen: list[tuple[int, int, int]] = []

    def evaluate(*parts: object, step: int, version: int) -> Evaluation:
        seen.append((step, version, run.engine.weights_version))
        return Evaluation(accuracy=0.5, accuracy_lenient=0.5, num_prompts=1)

    monkeypatch.setattr(rl_report, "evaluate", evaluate)
    train(run, monkeypatch)
    assert seen == [(0, 0, 0), (2, 4, 4), (4, 8, 8)]
    assert len(run.policy.gradients) == 10 == run.engine.weights_version
