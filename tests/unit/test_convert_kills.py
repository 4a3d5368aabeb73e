"""Conversions that are cut off go on, and give the same bytes."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.conversions import file_bytes, hf_to_mg, write_model

from mindspeed_rl.conversion import run
from mindspeed_rl.conversion.journal import Journal

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
    """Start a conversion in a forked process that notes every 64 KiB; its id."""
    child = os.fork()
    if child:
        return child
    try:
        with mock.patch.object(run, "_SYNC_BYTES", 1 << 16):
            hf_to_mg(model, target, [*FOUR, "--workers", "2"])
    except BaseException:
        os._exit(1)
    os._exit(0)


@pytest.mark.slow
def test_a_killed_conversion_goes_on_and_gives_the_same_bytes(tmp_path: Path) -> None:
    """SIGKILL at ten random moments; before the end the target is not there at all."""
    model = write_large_model(tmp_path / "model", 12)
    start = time.monotonic()
    assert os.waitpid(convert_in_child(model, tmp_path / "whole"), 0)[1] == 0
    seconds = time.monotonic() - start
    whole = file_bytes(tmp_path / "whole")
    rng, noted = random.Random(7), []
    for number in range(10):
        target = tmp_path / f"killed{number}"
        while not kill_at(rng.uniform(0.0, 1.0) * seconds, model, target):
            shutil.rmtree(target)  # it was done before the signal
        if target.exists():  # the signal came between the rename and the exit
            assert file_bytes(target) == whole
            shutil.rmtree(target)
            continue
        journal = tmp_path / f".{target.name}.converting" / "journal"
        noted.append(len(journal.read_text().splitlines()) if journal.exists() else 0)
        said = hf_to_mg(model, target, FOUR)
        resumed = any(line.startswith("resumed: ") for line in said)
        assert resumed or noted[-1] <= 1, "a journal begins with what is converted"
        assert file_bytes(target) == whole
        shutil.rmtree(target)
    assert len(set(noted)) > 3, noted
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "whole"]


def kill_at(after_s: float, model: Path, target: Path) -> bool:
    """Start a conversion and send SIGKILL; whether it was still running."""
    child = convert_in_child(model, target)
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1] != 0


def stop_after(num_tensors: int) -> mock._patch[Callable[..., int]]:
    """The disk fails at the tensor after these."""
    real, done = run._write_tensor, []

    def write(*args: object) -> int:
        if len(done) == num_tensors:
            raise OSError(28, "No space left on device")
        done.append(0)
        return real(*args)  # type: ignore[arg-type]

    return mock.patch.object(run, "_write_tensor", write)


def interrupted(model: Path, target: Path, num_tensors: int) -> None:
    with (
        mock.patch.object(run, "_SYNC_BYTES", 1),
        stop_after(num_tensors),
        pytest.raises(OSError, match=r"No space left.*same command again to go on"),
    ):
        hf_to_mg(model, target, [*TP2, "--workers", "1"])
    assert not target.exists()


def test_what_is_noted_is_not_written_again(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "mg"
    interrupted(model, target, 20)
    with mock.patch.object(run, "_write_tensor", wraps=run._write_tensor) as again:
        said = hf_to_mg(model, target, TP2)
    hf_to_mg(model, tmp_path / "whole", TP2)
    assert file_bytes(target) == file_bytes(tmp_path / "whole")
    num_tensors = sum(len(torch.load(p, weights_only=False)["model"]) for p in target.rglob("*.pt"))
    assert again.call_count == num_tensors - 20
    assert any(line.startswith("resumed: ") for line in said)


def test_a_note_that_was_cut_off_is_not_believed(model: Path, tmp_path: Path) -> None:
    target, journal = tmp_path / "mg", tmp_path / ".mg.converting" / "journal"
    interrupted(model, target, 20)
    text = journal.read_text()
    journal.write_text(text[:-4])  # the last line without its end: its tensor is written again
    with mock.patch.object(run, "_write_tensor", wraps=run._write_tensor) as again:
        hf_to_mg(model, target, TP2)
    hf_to_mg(model, tmp_path / "whole", TP2)
    assert file_bytes(target) == file_bytes(tmp_path / "whole")
    num_tensors = sum(len(torch.load(p, weights_only=False)["model"]) for p in target.rglob("*.pt"))
    assert again.call_count == num_tensors - 19


def test_another_source_or_layout_starts_anew(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "mg"
    mine = Path(shutil.copytree(model, tmp_path / "model"))
    interrupted(mine, target, 20)
    os.utime(mine / "model.safetensors", (1, 1))
    said = hf_to_mg(mine, target, TP2)
    assert not any(line.startswith("resumed") for line in said)


def test_two_processes_do_not_share_a_target(model: Path, tmp_path: Path) -> None:
    def second(*_: object) -> None:
        with pytest.raises(ValueError, match="another process is converting into it"):
            hf_to_mg(model, tmp_path / "mg", TP2)

    with mock.patch.object(run, "_finish", side_effect=[None], wraps=None) as finish:
        finish.side_effect = second
        hf_to_mg(model, tmp_path / "mg", TP2)


def named_and_killed(model: Path, target: Path) -> dict[str, bytes]:
    """A conversion that ends before it removes its folder; its files."""

    def end(self: Journal, *_: object) -> None:
        assert self._file is not None
        self._file.close()

    with mock.patch.object(Journal, "__exit__", end):
        hf_to_mg(model, target, TP2)
    assert not (target.parent / f".{target.name}.converting" / "out").exists()
    return file_bytes(target)


def test_a_target_that_was_named_before_a_kill_is_done(model: Path, tmp_path: Path) -> None:
    whole = named_and_killed(model, tmp_path / "mg")
    with mock.patch.object(run, "_write_tensor", side_effect=AssertionError):
        said = hf_to_mg(model, tmp_path / "mg", [*TP2, "--verify"])
    assert any(line.startswith("resumed: ") for line in said)
    assert any(line.startswith("verified: ") for line in said)
    assert file_bytes(tmp_path / "mg") == whole
    assert [p.name for p in tmp_path.iterdir()] == ["mg"]


def test_a_target_that_was_taken_away_is_written_again(model: Path, tmp_path: Path) -> None:
    """Its notes say that all is written; the files would be holes."""
    whole = named_and_killed(model, tmp_path / "mg")
    shutil.rmtree(tmp_path / "mg")
    hf_to_mg(model, tmp_path / "mg", TP2)
    assert file_bytes(tmp_path / "mg") == whole


def test_another_directory_in_the_place_of_a_target_is_kept(model: Path, tmp_path: Path) -> None:
    named_and_killed(model, tmp_path / "mg")
    min((tmp_path / "mg").rglob("*.pt")).unlink()
    with pytest.raises(ValueError, match="a conversion replaces nothing"):
        hf_to_mg(model, tmp_path / "mg", TP2)
