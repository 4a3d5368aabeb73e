"""Conversions that are cut off go on, and give the same bytes."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.conversions import file_bytes, hf_to_mg
from support.full_disk import largest_file

from mindspeed_rl.convert import command, run

TP2 = ("--target-tensor-parallel-size", "2")
FOUR = (*TP2, "--target-pipeline-parallel-size", "2")


def convert_until_killed(model: Path, target: Path, event: str, number: int) -> bool:
    """Convert in a forked process, which SIGKILL ends at the ``number``-th event of a kind.

    Events are methods of ``pathlib.Path`` and functions of ``os``. Returns whether it was killed.
    """
    child = os.fork()
    if not child:
        holder = Path if hasattr(Path, event) else os
        real, seen = getattr(holder, event), 0

        def counted(*args: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args)

        setattr(holder, event, counted)
        try:
            hf_to_mg(model, target, [*FOUR, "--workers", "2"])
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or status == 0
    return os.WIFSIGNALED(status)


def leftovers(target: Path) -> list[Path]:
    """What unfinished conversions left beside a target."""
    return sorted(target.parent.glob(f".{target.name}.converting-*"))


def finished_files(target: Path) -> list[Path]:
    return [path for folder in leftovers(target) for path in folder.rglob("*.pt")]


@pytest.mark.parametrize(
    ("event", "number"),
    [
        ("pwrite", 1),
        ("pwrite", 60),
        ("rename", 1),
        ("rename", 3),
        ("write_bytes", 1),
        ("fsync", 6),
    ],
)
def test_a_killed_conversion_goes_on_and_gives_the_same_bytes(
    model: Path, tmp_path: Path, event: str, number: int
) -> None:
    """Before a tensor, a file's name, the small files; the target is complete or not there."""
    target = tmp_path / "mg"
    assert convert_until_killed(model, target, event, number)
    assert not target.exists()
    kept = finished_files(target)
    said = hf_to_mg(model, target, FOUR)
    assert any(line.startswith("resumed: ") for line in said) == bool(kept)
    hf_to_mg(model, tmp_path / "whole", FOUR)
    assert file_bytes(target) == file_bytes(tmp_path / "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mg", "whole"]


def stop_after(num_tensors: int) -> mock._patch[Callable[..., None]]:
    """The disk fails at the tensor after these."""
    real, done = run._Writer._write_tensor, []

    def write(*args: Any) -> None:
        if len(done) == num_tensors:
            raise OSError(28, "No space left on device")
        done.append(0)
        real(*args)

    return mock.patch.object(run._Writer, "_write_tensor", write)


def interrupted(model: Path, target: Path, num_tensors: int) -> None:
    with (
        stop_after(num_tensors),
        pytest.raises(OSError, match="--save-dir"),
    ):
        hf_to_mg(model, target, [*FOUR, "--workers", "1"])
    assert not target.exists()


def test_finished_files_are_not_written_again(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "mg"
    hf_to_mg(model, tmp_path / "whole", FOUR)
    first = min((tmp_path / "whole").rglob("*.pt"))
    interrupted(model, target, len(torch.load(first, weights_only=False)["model"]) + 3)
    kept = finished_files(target)
    inodes = {path.relative_to(leftovers(target)[0]): path.stat().st_ino for path in kept}
    with mock.patch.object(command, "tqdm") as tqdm:
        said = hf_to_mg(model, target, FOUR)
    assert len(kept) == 1 and any(line.startswith("resumed: ") for line in said)
    assert {path: (target / path).stat().st_ino for path in inodes} == inodes
    updates = tqdm.return_value.__enter__.return_value.update.call_args_list
    first, *others = [call.args[0] for call in updates]
    assert first > 0 and first + sum(others) == tqdm.call_args.kwargs["total"]
    assert tqdm.call_args.kwargs["disable"] is True, "conversions of tests have --no-progress"
    assert file_bytes(target) == file_bytes(tmp_path / "whole")


def test_another_source_or_layout_starts_from_the_beginning(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "mg"
    mine = Path(shutil.copytree(model, tmp_path / "model"))
    interrupted(mine, target, 70)
    assert finished_files(target)
    os.utime(mine / "model.safetensors", (1, 1))
    said = hf_to_mg(mine, target, FOUR)
    assert not any(line.startswith("resumed") for line in said)
    assert not leftovers(target), "what nobody can go on with is removed"


@pytest.mark.parametrize("flags", [FOUR, TP2], ids=["same", "other"])
def test_two_processes_do_not_share_a_target(
    flags: tuple[str, ...], model: Path, tmp_path: Path
) -> None:
    real, attempts = run._check_space, []

    def second(*args: Any) -> None:
        if not attempts:
            attempts.append(0)
            with pytest.raises(ValueError, match="--save-dir"):
                hf_to_mg(model, tmp_path / "mg", flags)
        real(*args)

    with mock.patch.object(run, "_check_space", second):
        hf_to_mg(model, tmp_path / "mg", FOUR)
    assert attempts and (tmp_path / "mg").is_dir()


@pytest.mark.parametrize(
    "flags", [TP2, ("--ckpt-format", "torch_dist"), ("--save-model-type", "hf")]
)
def test_a_full_disk_is_told_with_how_to_go_on(
    flags: tuple[str, ...], model: Path, tmp_path: Path
) -> None:
    """While headers are written, or tensors."""
    with largest_file(20_000), pytest.raises(OSError, match="--save-dir"):
        hf_to_mg(model, tmp_path / "out", flags)
    assert not (tmp_path / "out").exists()
    hf_to_mg(model, tmp_path / "out", flags)
    assert any((tmp_path / "out").rglob("*"))
