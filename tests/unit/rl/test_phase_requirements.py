"""Work whose memory may be away is refused in the wrong state, and does nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.rl_run import TableRun, make_run

from mindspeed_rl.colocation.scheduler import Phase
from mindspeed_rl.generation.evaluate import evaluate
from mindspeed_rl.rl import resume
from mindspeed_rl.rl.sync import sync_weights
from mindspeed_rl.trainer.train_engine import TrainEngine

ABSENT = cast(Any, None)  # what is refused looks at nothing
IN_TRAIN: dict[str, Callable[[TableRun], object]] = {
    "save": lambda run: resume.save_if_due(run.parts, run.state, ABSENT),
    "load": lambda run: resume.start(run.parts),
    "update": lambda run: run.update(ABSENT),
    "sync_weights": lambda run: sync_weights(run.parts, 1),
}


@pytest.mark.parametrize("what", IN_TRAIN)
def test_refused_while_the_engine_has_the_device(what: str, tmp_path: Path) -> None:
    run = make_run(tmp_path, f"--save {tmp_path}/checkpoints --save-interval 1")
    run.to_rollout()
    with pytest.raises(RuntimeError, match=f"{what}: .*rollout"):
        IN_TRAIN[what](run)
    assert run.parts.scheduler.state is Phase.ROLLOUT and not (tmp_path / "checkpoints").exists()


def test_evaluation_is_refused_while_the_trainer_has_the_device(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with pytest.raises(RuntimeError, match=r"evaluate: .*train"):
        evaluate(ABSENT, run.parts.scheduler, ABSENT, ABSENT, step=0, version=0)


def test_an_update_waits_for_its_optimizer_state() -> None:
    """The switch lets it come beside the first passes."""
    arrived: list[bool] = []
    updated: list[bool] = []

    def step() -> tuple[bool, float, None]:
        assert arrived, "the state is still on its way"
        return True, 0.5, None

    engine = SimpleNamespace(
        platform=SimpleNamespace(wait_for_copies=lambda: arrived.append(True)),
        schedule=SimpleNamespace(advance=lambda: 1e-3, num_updates=1),
        optimizer=SimpleNamespace(param_groups=[{}], step=step),
        observer=SimpleNamespace(updated=lambda: updated.append(True)),
    )
    assert TrainEngine.step(cast(Any, engine)).grad_norm == 0.5
    assert updated == [True]
    assert engine.optimizer.param_groups == [{"lr": 1e-3}]
