"""A run destroys nothing that it did not make, and says so before it starts."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rl.config import (
    CheckpointConfig,
    IndexedDataConfig,
    LoggingConfig,
    ModelConfig,
    ParallelConfig,
    PretrainRunConfig,
    SftConfig,
    TrainConfig,
)
from mindspeed_rl.config.outputs import check_paths, earlier_results, export_record, export_target
from mindspeed_rl.metrics import output_dir

DIRECTORIES = ("model", "out", "save", "load")


@pytest.fixture
def run(tmp_path: Path) -> PretrainRunConfig:
    """A run whose paths are fine."""
    for name in DIRECTORIES:
        (tmp_path / name).mkdir()
    return PretrainRunConfig(
        model=ModelConfig(hf_checkpoint=str(tmp_path / "model")),
        parallel=ParallelConfig(),
        train=TrainConfig(),
        checkpoint=CheckpointConfig(),
        logging=LoggingConfig(output_dir=str(tmp_path / "out")),
        sft=SftConfig(),
        indexed=IndexedDataConfig(),
    )


def with_checkpoint(run: PretrainRunConfig, **changes: Any) -> PretrainRunConfig:
    return replace(run, checkpoint=replace(run.checkpoint, **changes))


def with_logging(run: PretrainRunConfig, **changes: Any) -> PretrainRunConfig:
    return replace(run, logging=replace(run.logging, **changes))


def make_export(target: Path, step: int = 3) -> Path:
    target.mkdir(parents=True, exist_ok=True)
    (target / "model.safetensors").write_bytes(b"weights")
    (target / "export.json").write_text(json.dumps(export_record(step, ["model.safetensors"])))
    return target


def test_good_paths_pass_and_nothing_is_made(run: PretrainRunConfig, tmp_path: Path) -> None:
    paths = {"save": "new/save", "export_hf": "new/hf", "load": "load"}
    check_paths(with_checkpoint(run, **{name: str(tmp_path / p) for name, p in paths.items()}))
    check_paths(with_logging(run, tensorboard_dir=str(tmp_path / "new" / "tb")))
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(DIRECTORIES)


def test_code_that_an_export_needs_is_there_before_the_run(
    run: PretrainRunConfig, tmp_path: Path
) -> None:
    names = {"auto_map": {"AutoModelForCausalLM": "modeling_mine.Model"}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(names))
    with pytest.raises(ValueError, match=r"modeling_mine\.py is missing, which .* names: .*; copy"):
        check_paths(with_checkpoint(run, export_hf=str(tmp_path / "hf")))


def test_an_export_replaces_only_an_export(run: PretrainRunConfig, tmp_path: Path) -> None:
    target = tmp_path / "thesis"
    check = with_checkpoint(run, export_hf=str(target))
    target.mkdir()
    check_paths(check)  # an empty directory has nothing to lose
    (target / "chapter.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"--export-hf .*thesis exists and was not exported by"):
        check_paths(check)
    (target / "export.json").write_text('{"format": "another"}')
    with pytest.raises(ValueError, match=r"was not exported by mindspeed_rl"):
        check_paths(check)
    make_export(target)
    with pytest.raises(ValueError, match=r"holds more than the export it was: chapter\.tex; move"):
        check_paths(check)
    (target / "chapter.tex").unlink()
    check_paths(check)


@pytest.mark.parametrize(
    ("target", "changes", "words"),
    [
        ("model", {}, r"is --hf-checkpoint .*model, which the export would replace"),
        (".", {}, r"contains --hf-checkpoint .*choose a directory of its own"),
        ("out", {}, r"is --output-dir .*out"),
        ("save", {"save": "save"}, r"is --save .*save"),
        ("save", {"save": "save/deep"}, r"contains --save .*save/deep"),
        ("load", {"load": "load"}, r"is --load .*load"),
    ],
)
def test_an_export_must_not_land_on_what_the_run_uses(
    run: PretrainRunConfig, tmp_path: Path, target: str, changes: dict[str, str], words: str
) -> None:
    paths = {name: str(tmp_path / path) for name, path in changes.items()}
    with pytest.raises(ValueError, match=words):
        check_paths(with_checkpoint(run, export_hf=str(tmp_path / target), **paths))


def test_a_link_to_the_checkpoint_is_the_checkpoint(run: PretrainRunConfig, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(tmp_path / "model")
    with pytest.raises(ValueError, match="is --hf-checkpoint"):
        check_paths(with_checkpoint(run, export_hf=str(tmp_path / "alias")))


@pytest.mark.parametrize("name", ["save", "export_hf"])
def test_a_place_below_a_file_is_refused(run: PretrainRunConfig, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    flag = "--" + name.replace("_", "-")
    path = str(tmp_path / "file" / "deeper" / "x")
    with pytest.raises(ValueError, match=rf"{flag} .*/file is not a directory; choose another"):
        check_paths(with_checkpoint(run, **{name: path}))


@pytest.mark.parametrize("name", ["output_dir", "tensorboard_dir"])
def test_a_place_without_permission_is_refused(
    run: PretrainRunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    permitted = os.access  # the tests may run as root, who may write anywhere
    monkeypatch.setattr(os, "access", lambda p, mode: p != closed and permitted(p, mode))
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ValueError, match=rf"{flag} .*no permission to write in .*closed;"):
        check_paths(with_logging(run, **{name: str(closed / "run")}))


def test_load_must_exist(run: PretrainRunConfig, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--load .*nowhere: no such directory; name the --save"):
        check_paths(with_checkpoint(run, load=str(tmp_path / "nowhere")))


def test_an_interval_without_a_folder_saves_nothing(run: PretrainRunConfig, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--save-interval 5 without --save: .*add --save DIR"):
        check_paths(with_checkpoint(run, save_interval=5))
    check_paths(with_checkpoint(run, save_interval=5, save=str(tmp_path / "save")))


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


def test_a_fresh_run_does_not_mix_with_an_old_one(run: PretrainRunConfig, tmp_path: Path) -> None:
    expected = old_run(tmp_path / "out")
    assert earlier_results(run.logging.output_dir) == expected
    with pytest.raises(ValueError) as caught:
        check_paths(run)
    for words in (
        "--output-dir", "metrics.jsonl, rollouts.jsonl, summary.json, curves.png, "
        "tensorboard, hf",
        "choose another --output-dir", "--overwrite-output-dir", "--load DIR to go on",
    ):  # fmt: skip
        assert words in str(caught.value)
    check_paths(with_logging(run, overwrite_output_dir=True))
    resumed = with_checkpoint(run, load=str(tmp_path / "load"))
    check_paths(resumed)
    with pytest.raises(ValueError, match="holds the results of an earlier run"):
        check_paths(with_checkpoint(run, load=str(tmp_path / "load"), finetune=True))


def test_events_in_a_folder_of_the_users_are_neither_mixed_nor_removed(
    run: PretrainRunConfig, tmp_path: Path
) -> None:
    events = tmp_path / "events"
    events.mkdir()
    other = events / "events.out.tfevents.1.host"
    other.touch()
    shared = with_logging(run, tensorboard_dir=str(events))
    with pytest.raises(ValueError, match=r"--tensorboard-dir .*events holds .*tfevents\.1\.host"):
        check_paths(shared)
    check_paths(with_logging(shared, overwrite_output_dir=True))
    check_paths(with_checkpoint(shared, load=str(tmp_path / "load")))
    assert other not in earlier_results(shared.logging.output_dir)


def test_only_results_are_removed(tmp_path: Path) -> None:
    old = old_run(tmp_path)
    output_dir.remove(earlier_results(str(tmp_path)))
    assert not any(path.exists() for path in old)
    left = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert left == ["notes.txt", "tensorboard/mine.txt"]


def test_a_model_with_files_of_the_user_is_not_removed(tmp_path: Path) -> None:
    hf = make_export(tmp_path / "hf")
    (hf / "README.md").write_text("mine")
    with pytest.raises(ValueError, match=r"holds more than the export it was: README\.md"):
        output_dir.remove(earlier_results(str(tmp_path)))
    assert (hf / "model.safetensors").exists() and (hf / "README.md").exists()


def test_a_supervised_run_exports_only_when_asked(run: PretrainRunConfig) -> None:
    assert export_target(run) == ""
    assert export_target(with_checkpoint(run, export_hf="x")) == "x"
