"""A run destroys nothing that it did not make, and says so before it starts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.checked_runs import configured

from mindspeed_rl.config import PretrainRunConfig
from mindspeed_rl.config.outputs import check_paths, earlier_results, export_record, export_target
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.metrics import output_dir

DIRECTORIES = ("model", "out", "save", "load")
Check = Callable[[str], None]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Check a run whose paths are fine with further flags; ``DIR`` is the folder of its paths."""
    for name in DIRECTORIES:
        (tmp_path / name).mkdir()

    def checked(flags: str) -> None:
        valid = f"--hf-checkpoint DIR/model --output-dir DIR/out {flags}"
        check_paths(configured(PretrainRunConfig, valid.replace("DIR", str(tmp_path))))

    return checked


def make_export(target: Path, step: int = 3) -> Path:
    target.mkdir(parents=True, exist_ok=True)
    (target / "model.safetensors").write_bytes(b"weights")
    (target / "export.json").write_text(json.dumps(export_record(step, ["model.safetensors"])))
    return target


def test_good_paths_pass_and_nothing_is_made(check: Check, tmp_path: Path) -> None:
    check("--save DIR/new/save --save-interval 5 --export-hf DIR/new/hf --load DIR/load")
    check("--tensorboard-dir DIR/new/tb")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(DIRECTORIES)


def test_a_run_may_load_from_its_own_folder_before_that_exists(
    check: Check, tmp_path: Path
) -> None:
    """A job that is started again with the same command needs it."""
    check(f"--save {tmp_path}/save --load {tmp_path}/../{tmp_path.name}/save")
    with pytest.raises(ValueError, match=r"--load .*other: no such directory"):
        check(f"--save {tmp_path}/save --load {tmp_path}/other")


def test_an_export_replaces_only_an_export(check: Check, tmp_path: Path) -> None:
    target, flags = tmp_path / "thesis", "--export-hf DIR/thesis"
    target.mkdir()
    check(flags)  # an empty directory has nothing to lose
    (target / "chapter.tex").write_text("years of work")
    with pytest.raises(UsageError, match="--export-hf"):
        check(flags)
    (target / "export.json").write_text('{"format": "another"}')
    with pytest.raises(UsageError, match="--export-hf"):
        check(flags)
    make_export(target)
    with pytest.raises(UsageError, match=r"holds more .*chapter\.tex"):
        check(flags)
    (target / "chapter.tex").unlink()
    check(flags)


@pytest.mark.parametrize("flag", ["--output-dir", "--tensorboard-dir"])
def test_a_place_without_permission_is_refused(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    permitted = os.access  # the tests may run as root, who may write anywhere
    monkeypatch.setattr(os, "access", lambda p, mode: p != closed and permitted(p, mode))
    with pytest.raises(UsageError, match=f"{flag} .*no permission"):
        check(f"{flag} DIR/closed/run")


def old_run(output: Path) -> list[Path]:
    """The results of a run that is over."""
    names = ("metrics.jsonl", "rollouts.jsonl", "summary.json", "curves.png")
    for name in names:
        (output / name).write_text("{}")
    (output / "tensorboard").mkdir()
    (output / "tensorboard" / "events.out.tfevents.1.host").touch()
    make_export(output / "hf")
    (output / "notes.txt").write_text("mine")
    (output / "tensorboard" / "mine.txt").touch()
    return [
        *(output / name for name in names),
        output / "tensorboard" / "events.out.tfevents.1.host",
        output / "hf",
    ]


def test_a_fresh_run_does_not_mix_with_an_old_one(check: Check, tmp_path: Path) -> None:
    expected = old_run(tmp_path / "out")
    assert earlier_results(str(tmp_path / "out")) == expected
    with pytest.raises(UsageError) as caught:
        check("")
    for words in ("--output-dir", "metrics.jsonl", "hf", "--overwrite-output-dir", "--load"):
        assert words in str(caught.value)
    check("--overwrite-output-dir")
    check("--load DIR/load")
    with pytest.raises(UsageError, match="--output-dir"):
        check("--load DIR/load --finetune")


def test_events_in_a_folder_of_the_users_are_neither_mixed_nor_removed(
    check: Check, tmp_path: Path
) -> None:
    events = tmp_path / "events"
    events.mkdir()
    other = events / "events.out.tfevents.1.host"
    other.touch()
    shared = "--tensorboard-dir DIR/events"
    with pytest.raises(UsageError, match=r"--tensorboard-dir .*tfevents"):
        check(shared)
    check(f"{shared} --overwrite-output-dir")
    check(f"{shared} --load DIR/load")
    assert other not in earlier_results(str(tmp_path / "out"))


def test_only_results_are_removed(tmp_path: Path) -> None:
    old = old_run(tmp_path)
    output_dir.remove(earlier_results(str(tmp_path)))
    assert not any(path.exists() for path in old)
    left = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert left == ["notes.txt", "tensorboard/mine.txt"]


def test_a_model_with_files_of_the_user_is_not_removed(tmp_path: Path) -> None:
    hf = make_export(tmp_path / "hf")
    (hf / "README.md").write_text("mine")
    with pytest.raises(UsageError, match=r"holds more .*README\.md"):
        output_dir.remove(earlier_results(str(tmp_path)))
    assert (hf / "model.safetensors").exists() and (hf / "README.md").exists()


def test_a_supervised_run_exports_only_when_asked() -> None:
    assert export_target(configured(PretrainRunConfig, "")) == ""
    assert export_target(configured(PretrainRunConfig, "--export-hf x")) == "x"
