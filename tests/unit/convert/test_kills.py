"""Conversions that are cut off go on, and give the same bytes."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.conversions import file_bytes, hf_to_mg, write_model
from support.full_disk import largest_file

from mindspeed_rl.convert import run

TP2 = ("--target-tensor-parallel-size", "2")
FOUR = (*TP2, "--target-pipeline-parallel-size", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("deepseek", tmp_path_factory.mktemp("models") / "model")


def write_large_model(folder: Path, num_layers: int) -> Path:
    """About 1.5 MB a layer, so that a conversion takes long enough to be killed."""
    model = write_model("qwen3", folder, num_hidden_layers=num_layers, hidden_size=256,
                        intermediate_size=512, head_dim=64)  # fmt: skip
    return model


def convert_in_child(model: Path, target: Path) -> int:
    """Start a conversion in a forked process; its id."""
    child = os.fork()
    if child:
        return child
    try:
        hf_to_mg(model, target, [*FOUR, "--workers", "2"])
    except BaseException:
        os._exit(1)
    os._exit(0)


def leftovers(target: Path) -> list[Path]:
    """What unfinished conversions left beside a target."""
    return sorted(target.parent.glob(f".{target.name}.converting-*"))


def finished_files(target: Path) -> list[Path]:
    return [path for folder in leftovers(target) for path in folder.rglob("*.pt")]


@pytest.mark.slow
def test_a_killed_conversion_goes_on_and_gives_the_same_bytes(tmp_path: Path) -> None:
    """SIGKILL at ten random moments; the target is complete or not there at all."""
    model = write_large_model(tmp_path / "model", 12)
    start = time.monotonic()
    assert os.waitpid(convert_in_child(model, tmp_path / "whole"), 0)[1] == 0
    seconds = time.monotonic() - start
    whole = file_bytes(tmp_path / "whole")
    rng, stopped = random.Random(7), 0
    for number in range(10):
        target = tmp_path / f"killed{number}"
        child = convert_in_child(model, target)
        time.sleep(rng.uniform(0.2, 1.0) * seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if not target.exists():
            stopped += 1
            kept = finished_files(target)
            said = hf_to_mg(model, target, FOUR)
            assert any(line.startswith("resumed: ") for line in said) == bool(kept)
        assert file_bytes(target) == whole
        shutil.rmtree(target)
    assert stopped
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "whole"]


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
        pytest.raises(OSError, match=r"No space left.*same command again to go on"),
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
    said = hf_to_mg(model, target, FOUR)
    assert len(kept) == 1 and any(line.startswith("resumed: ") for line in said)
    assert {path: (target / path).stat().st_ino for path in inodes} == inodes
    assert file_bytes(target) == file_bytes(tmp_path / "whole")


def test_another_source_or_layout_starts_anew(model: Path, tmp_path: Path) -> None:
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
            with pytest.raises(ValueError, match="another process is converting into it"):
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
    with largest_file(20_000), pytest.raises(OSError, match=r"out: File too large.*free space"):
        hf_to_mg(model, tmp_path / "out", flags)
    assert not (tmp_path / "out").exists()
    hf_to_mg(model, tmp_path / "out", flags)
    assert any((tmp_path / "out").rglob("*"))
