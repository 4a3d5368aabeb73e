"""Stopping and resuming a run whose models are tables: when it saves, and what comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from support.rl_run import TablePolicy, make_run
from support.table_engine import first_table, single_rank

from mindspeed_rl.rl import advantages as rl_batch
from mindspeed_rl.rl import checkpoints
from mindspeed_rl.rl import resume as rl_resume
from mindspeed_rl.rl import update as rl_step
from mindspeed_rl.rl.build import RLJob
from mindspeed_rl.trainer.checkpoint import LoadedState

REWARDS: dict[int, float | None] = dict(enumerate((1.0, 0.0, 0.0, 1.0, 1.0, 0.5)))
FLAGS = "--grpo-kl-beta 0.1 --rl-kl-estimator k1 --rl-kl-target 0.1 --rl-kl-horizon 60 "


@pytest.fixture(autouse=True, scope="module")
def world() -> Iterator[None]:
    with single_rank():
        yield


@pytest.mark.parametrize(
    ("interval", "due"), [(0, [5]), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (5, [5]), (7, [5])]
)
def test_a_checkpoint_is_due_at_every_interval_and_at_the_end(
    tmp_path: Path, interval: int, due: list[int]
) -> None:
    job = make_run(tmp_path, f"--train-iters 5 --save x --save-interval {interval}").job
    assert [step for step in range(1, 6) if checkpoints.save_is_due(job, step)] == due


def test_without_a_folder_nothing_is_due(tmp_path: Path) -> None:
    job = make_run(tmp_path, "--train-iters 5").job
    assert not any(checkpoints.save_is_due(job, step) for step in range(1, 6))


def step_of(run: RLJob, step: int) -> None:
    run.phases.to_rollout(run.version)
    rollouts = rl_step.collect(run, step)
    run.phases.to_train()
    batches = rl_batch.build_batches(run, rollouts.samples)
    batches = rl_batch.annotate(run, batches, rollouts.samples)
    batches = rl_batch.with_advantages(run, batches, rollouts.samples, step)
    rl_step.update(run, batches)


def test_a_resumed_run_has_the_state_of_the_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps, a save and a restart: prompts, version, KL coefficient and lengths go on."""
    saved: dict[str, Any] = {}

    def save(job: Any, engine: Any, step: int, extra: Any, companions: Any) -> None:
        saved.update(step=step, extra=json.loads(json.dumps(extra)))

    def load(job: Any, engine: Any, companions: Any) -> LoadedState:
        return LoadedState(saved["step"], saved["extra"]) if saved else LoadedState(0, {})

    monkeypatch.setattr(checkpoints, "save", save)
    monkeypatch.setattr(checkpoints, "load", load)
    flags = FLAGS + "--save x --save-interval 2 --global-batch-size 3"
    run = make_run(tmp_path, flags, REWARDS)
    cast(TablePolicy, run.reference).table = first_table() - 0.5  # a KL above its target
    report = rl_resume.start(run)
    for step in (1, 2):
        step_of(run, step)
        rl_resume.save_if_due(run, report, step)
    assert saved["step"] == 2 and run.kl_beta > 0.1 and run.version == 4
    again = make_run(tmp_path, flags, REWARDS)
    assert rl_resume.start(again).start == 2
    assert (again.version, again.kl_beta) == (run.version, run.kl_beta)
    lengths = again.lengths.state_dict()
    assert lengths == run.lengths.state_dict() and lengths["relative"]
    assert again.sampler.next(20) == run.sampler.next(20)


def test_a_constant_coefficient_is_that_of_the_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run without --rl-kl-target may be resumed with another --grpo-kl-beta."""
    run = make_run(tmp_path, "--grpo-kl-beta 0.2", REWARDS)
    state = {"sampler": run.sampler.state_dict(), "version": 3, "kl_beta": 0.7, "surplus": [],
             "num_pending": 0, "lengths": run.lengths.state_dict(), "report": {}}  # fmt: skip
    report = rl_resume.Report(run).state_dict()
    loaded = LoadedState(1, state | {"report": report})
    monkeypatch.setattr(checkpoints, "load", lambda *_: replace(loaded))
    assert rl_resume.start(run).start == 1
    assert (run.version, run.kl_beta) == (3, 0.2)
