"""The checkpoint folder: what is complete, and that a kill never costs the last one."""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from mindspeed_rl.checkpoint import resume
from mindspeed_rl.checkpoint.resume import RECORD, TRACKER, CheckpointRecord


def make_record(step: int) -> CheckpointRecord:
    layout = {"tp": 1, "pp": 1, "cp": 1, "dp": 2}
    return CheckpointRecord(step, 2 * step, {"num_layers": 2}, layout, "AdamW", True, {"a": [1]})


def save(root: Path, step: int) -> Path:
    partial = resume.begin(root, step, needed_bytes=0)
    (partial / "tensors.distcp").write_bytes(bytes(100 + step % 100))
    (partial / "nested").mkdir()
    (partial / "nested" / "common.pt").write_bytes(b"state")
    return resume.commit(root, make_record(step))


def test_newest_complete_checkpoint_is_found_with_its_record(tmp_path: Path) -> None:
    root = tmp_path / "save"
    for step in (2, 9_999_999, 10_000_000):  # by number, not by name or time
        assert save(root, step) == root / f"iter_{step:07d}"
    save(root, 4)
    found = resume.find_latest(root)
    assert found == resume.Found(root / "iter_10000000", ())
    assert resume.read_record(root / "iter_10000000") == make_record(10_000_000)
    assert (root / TRACKER).read_text() == "4\n"


def test_a_step_asks_for_the_newest_checkpoint_before_it(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        save(tmp_path, step)
    found = {step: resume.find_latest(tmp_path, before=step).path for step in (2, 3, 4, 5, 99)}
    names = {step: path and path.name for step, path in found.items()}
    assert names == {
        2: None, 3: "iter_0000002", 4: "iter_0000002", 5: "iter_0000004", 99: "iter_0000006"
    }  # fmt: skip


def test_a_record_keeps_numbers_that_json_has_not(tmp_path: Path) -> None:
    """A response that goes on has no reward yet, and a reward may abstain: both are NaN."""
    extra = {"carryover": [[{"reward": math.nan, "parts": [0.5, math.nan]}]], "worst": -math.inf}
    resume.begin(tmp_path, 3, needed_bytes=0)
    path = resume.commit(tmp_path, replace(make_record(3), extra=extra))
    json.loads((path / RECORD).read_text(), parse_constant=pytest.fail)
    found = resume.read_record(path).extra
    ((carried,),) = found["carryover"]
    assert math.isnan(carried["reward"]) and math.isnan(carried["parts"][1])
    assert (carried["parts"][0], found["worst"]) == (0.5, -math.inf)


def test_empty_folder_has_none_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    assert resume.find_latest(tmp_path) == resume.Found(None, ())
    with pytest.raises(ValueError, match=r"--load .*absent"):
        resume.find_latest(tmp_path / "absent")


def _replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / RECORD).unlink(), f"no {RECORD}"),
        (lambda path: (path / RECORD).write_text('{"step": 4, '), f"{RECORD} is broken"),
        (lambda path: (path / RECORD).write_text("[]"), f"{RECORD} is broken"),
        (lambda path: (path / "tensors.distcp").unlink(), "tensors.distcp is missing"),
        (
            lambda path: (path / "tensors.distcp").write_bytes(b"short"),
            "tensors.distcp has 5 bytes instead of 104",
        ),
        (lambda path: (path / "nested" / "common.pt").unlink(), "nested/common.pt is missing"),
        (lambda path: _replace_by_pipe(path / RECORD), f"no {RECORD}"),
        (
            lambda path: shutil.copytree(path.with_name("iter_0000002"), path, dirs_exist_ok=True),
            "it holds step 2 under the name of step 4: rename it to iter_0000002",
        ),
    ],
)
def test_damaged_checkpoint_is_passed_over_and_told(
    damage: object, reason: str, tmp_path: Path
) -> None:
    previous = save(tmp_path, 2)
    damage(save(tmp_path, 4))  # type: ignore[operator]
    found = resume.find_latest(tmp_path)
    assert found.path == previous and len(found.ignored) == 1
    assert found.ignored[0].startswith(f"iter_0000004: {reason}")
    assert save(tmp_path, 4) == resume.find_latest(tmp_path).path, "it can be written again"
    assert (tmp_path / "iter_0000004.damaged").is_dir(), "and what was there stays"


def test_a_converted_checkpoint_may_have_the_name_of_any_step(tmp_path: Path) -> None:
    """It has only weights, and the step of where they came from is not counted."""
    converted = replace(make_record(7), extra={resume.CONVERTED: "elsewhere"})
    resume.begin(tmp_path, 7, needed_bytes=0)
    other = resume.commit(tmp_path, converted).rename(tmp_path / "iter_0000001")
    assert resume.find_latest(tmp_path) == resume.Found(other, ())


def _raise(*args: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "moment",
    ["mindspeed_rl.checkpoint.resume.sync_path", "mindspeed_rl.checkpoint.resume.write_text_atomic",
     "pathlib.Path.rename"],
)  # fmt: skip
def test_interrupted_commit_leaves_the_previous_one(moment: str, tmp_path: Path) -> None:
    previous = save(tmp_path, 2)
    with mock.patch(moment, _raise), pytest.raises(KeyboardInterrupt):
        save(tmp_path, 4)
    found = resume.find_latest(tmp_path)
    assert found == resume.Found(previous, ("iter_0000004.partial: its save did not finish",))
    save(tmp_path, 6)
    assert not list(tmp_path.glob("*.partial")), "leftovers are removed by the next save"
    assert previous.is_dir()


def test_complete_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    save(tmp_path, 2)
    with pytest.raises(ValueError, match="iter_0000002 exists already"):
        save(tmp_path, 2)
    assert resume.find_latest(tmp_path).path == tmp_path / "iter_0000002"


def test_run_may_not_write_among_the_checkpoints_of_another(tmp_path: Path) -> None:
    resume.refuse_other_run(tmp_path / "absent", 0)
    resume.refuse_other_run(tmp_path, 0)
    save(tmp_path, 4)
    resume.refuse_other_run(tmp_path, 4)
    with pytest.raises(ValueError, match=r"holds iter_0000004 .* --load"):
        resume.refuse_other_run(tmp_path, 2)


def test_a_damaged_checkpoint_is_set_aside_and_not_found_again(tmp_path: Path) -> None:
    kept = save(tmp_path, 2)
    for number in ("", "-2"):
        damaged = save(tmp_path, 4)
        found = resume.find_latest(tmp_path, {"iter_0000004": "its bytes changed"})
        assert found == resume.Found(kept, ("iter_0000004: its bytes changed",))
        assert resume.set_aside(damaged) == tmp_path / f"iter_0000004.damaged{number}"
        assert resume.find_latest(tmp_path) == resume.Found(kept, ())
    assert (tmp_path / "iter_0000004.damaged" / RECORD).is_file()
    (tmp_path / "iter_0000006.partial").mkdir()
    resume.sweep(tmp_path)
    resume.sweep(tmp_path / "absent")
    assert not (tmp_path / "iter_0000006.partial").exists()


def test_full_disk_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"takes about 1073741824\.0 GiB"):
        resume.begin(tmp_path, 2, needed_bytes=2**60)
    assert list(tmp_path.iterdir()) == []


def test_record_of_another_version_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    fields = json.loads((path / RECORD).read_text())
    (path / RECORD).write_text(json.dumps(fields | {"later": 1}))
    with pytest.raises(ValueError, match="another version of mindspeed_rl"):
        resume.read_record(path)


@pytest.mark.parametrize("file", ["mp_rank_00/model_optim_rng.pt", "metadata.json"])
def test_a_checkpoint_of_another_tool_is_not_saved_over(tmp_path: Path, file: str) -> None:
    place = tmp_path / "iter_0000001" / file
    place.parent.mkdir(parents=True)
    place.write_text("precious")
    with pytest.raises(ValueError, match="holds iter_0000001, which another"):
        resume.refuse_other_run(tmp_path, 0)
