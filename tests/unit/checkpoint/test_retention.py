"""Which checkpoints stay: the newest, and the best by a metric."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from mindspeed_rl.checkpoint import resume
from mindspeed_rl.checkpoint.resume import CheckpointRecord
from mindspeed_rl.checkpoint.retention import BEST, Kept, best_step, keep, removable
from mindspeed_rl.config.training import CheckpointConfig


def save(root: Path, *steps: int) -> None:
    for step in steps:
        (resume.begin(root, step, needed_bytes=0) / "tensors").write_bytes(bytes(step))
        layout = {"tp": 1, "pp": 1, "cp": 1, "dp": 1}
        resume.commit(root, CheckpointRecord(step, step, {}, layout, "", False, {}))


def steps_in(root: Path) -> list[int]:
    return [resume.step_of(path) for path in sorted(root.glob("iter_*")) if path.is_dir()]


@pytest.mark.parametrize(
    ("limit", "best", "gone"),
    [(0, None, []), (2, None, [1, 3]), (2, 1, [3]), (1, 9, [1, 3, 7]), (4, 1, []), (9, None, [])],
)
def test_the_newest_and_the_best_stay(limit: int, best: int | None, gone: list[int]) -> None:
    assert removable([7, 1, 9, 3], limit, best) == gone


@pytest.mark.parametrize(
    ("steps", "told"), [((6,), "checkpoint of step 6 ("), ((6, 9), "checkpoints of steps 6, 9 (")]
)
def test_what_was_removed_is_told(steps: tuple[int, ...], told: str) -> None:
    assert Kept(steps).removed_line == f"removed the {told}--save-total-limit)"


def test_the_best_is_by_direction_and_the_later_of_equals() -> None:
    scores = {1: 0.5, 2: math.nan, 3: 0.75, 4: 0.25, 5: 0.75, 8: 9.0}
    assert best_step([1, 2, 3, 4, 5], scores, largest=True) == 5
    assert best_step([1, 2, 3, 4, 5], scores, largest=False) == 4
    assert best_step([2, 6], scores, largest=True) is None


def test_the_best_outlives_the_limit_and_a_resume(tmp_path: Path) -> None:
    """The resumed process has seen the values of its own steps alone."""
    options = CheckpointConfig(
        save=str(tmp_path), save_total_limit=1, save_best_metric="eval/accuracy"
    )
    save(tmp_path, 2)
    assert keep(options, {}) == Kept(missing="eval/accuracy")
    save(tmp_path, 4)
    assert keep(options, {2: 0.875}) == Kept(best=2)
    save(tmp_path, 6)
    assert keep(options, {4: 0.5}) == Kept((4,), 2)
    assert steps_in(tmp_path) == [2, 6]
    assert keep(options, {6: 0.9375}) == Kept((2,), 6), "known after the save of its step"
    assert steps_in(tmp_path) == [6]
    record = json.loads((tmp_path / BEST).read_text())
    assert (record["step"], record["value"], record["checkpoint"]) == (6, 0.9375, "iter_0000006")
    other = CheckpointConfig(save=str(tmp_path), save_best_metric="reward/mean")
    assert keep(other, {}).missing == "reward/mean", "values of another metric do not count"


def test_the_smallest_value_is_the_best_where_it_is_asked_for(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    options = CheckpointConfig(
        save=str(tmp_path), save_total_limit=1, save_best_metric="loss", save_best_direction="min"
    )
    assert keep(options, {1: 2.0, 2: 1.5, 3: 1.75}) == Kept((1,), 2)


def test_a_damaged_checkpoint_and_one_in_the_making_are_not_counted(tmp_path: Path) -> None:
    """With a limit of one, the newest sound checkpoint stays."""
    save(tmp_path, 1, 2, 3)
    (tmp_path / "iter_0000003" / "tensors").write_bytes(b"")
    resume.begin(tmp_path, 4, needed_bytes=0)
    assert keep(CheckpointConfig(save=str(tmp_path), save_total_limit=1), {}) == Kept((1,))
    assert resume.find_latest(tmp_path).path == tmp_path / "iter_0000002"
    assert (tmp_path / "iter_0000004.partial").is_dir()


def test_a_killed_removal_leaves_nothing_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, 2)

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("mindspeed_rl.checkpoint.resume.shutil.rmtree", killed)
        keep(CheckpointConfig(save=str(tmp_path), save_total_limit=1), {})
    assert [path.name for path in resume.sweep(tmp_path)] == ["iter_0000001.partial"]
    assert [path.name for path in sorted(tmp_path.glob("iter_*"))] == ["iter_0000002"]
