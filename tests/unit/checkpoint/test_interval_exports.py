"""Exports while a run goes on: when, where, and which stay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_rl.checkpoint.interval_exports import due_target, keep_newest
from mindspeed_rl.config.outputs import EXPORT_RECORD, earlier_results, export_record
from mindspeed_rl.config.training import CheckpointConfig
from mindspeed_rl.core.export_names import interval_exports


def exported(path: Path, step: int) -> None:
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / EXPORT_RECORD).write_text(json.dumps(export_record(step, ["config.json"])))


@given(interval=st.integers(1, 9), last=st.integers(1, 60))
def test_every_so_many_steps_but_not_after_the_last(interval: int, last: int) -> None:
    options = CheckpointConfig(export_hf_interval=interval)
    found = [s for s in range(1, last + 1) if due_target(options, "out/hf", s, last) is not None]
    assert found == list(range(interval, last, interval))


def test_the_folder_stands_beside_the_last_export() -> None:
    options = CheckpointConfig(export_hf_interval=20)
    assert due_target(options, "out/hf", 40, 100) == Path("out/hf-step40")
    assert due_target(options, "", 40, 100) is None, "a warm start without --export-hf"
    assert due_target(CheckpointConfig(), "out/hf", 40, 100) is None


def test_the_newest_stay(tmp_path: Path) -> None:
    target = tmp_path / "hf"
    for step in (8, 100, 20, 40):
        exported(tmp_path / f"hf-step{step}", step)
    exported(target, 120)
    for other in ("hf-stepx", "hf-step", "other-step4"):
        (tmp_path / other).mkdir()
    assert keep_newest(target, 0, 100) == []
    assert keep_newest(target, 2, 100) == [8, 20]
    assert list(interval_exports(target)) == [40, 100]
    assert keep_newest(target, 1, 40) == [], "a run that was taken back writes step 100 again"
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"hf", "hf-step40", "hf-step100", "hf-stepx", "hf-step", "other-step4"}


def test_what_is_no_export_stays(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        exported(tmp_path / f"hf-step{step}", step)
    (tmp_path / "hf-step1" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"--export-hf-limit .*hf-step1 holds more"):
        keep_newest(tmp_path / "hf", 1, 3)
    assert (tmp_path / "hf-step1" / "notes.txt").exists()


def test_a_fresh_run_finds_them_among_the_results_of_another(tmp_path: Path) -> None:
    exported(tmp_path / "hf-step20", 20)
    (tmp_path / "hf-step40").mkdir()
    assert earlier_results(str(tmp_path)) == [tmp_path / "hf-step20"]
