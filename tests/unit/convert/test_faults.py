"""Conversions that cannot be done say why."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from support.classic_writer import Classic, write_classic
from support.conversions import (
    add_mtp,
    config_of,
    convert,
    edit_config,
    hf_tensors,
    hf_to_mg,
    mg_to_hf,
)

from mindspeed_rl.convert import __main__ as tool
from mindspeed_rl.convert import command
from mindspeed_rl.convert import source as sources
from mindspeed_rl.convert.options import parse_options
from mindspeed_rl.convert.source import Source, UnreadableError
from mindspeed_rl.convert.target import Target
from mindspeed_rl.core.errors import UsageError

TP2 = ("--target-tensor-parallel-size", "2")
FOUR = (*TP2, "--target-pipeline-parallel-size", "2")


@pytest.fixture(scope="module")
def classic(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classic") / "mg"
    write_classic(Classic(tp=2, pp=2, ep=2), hf_tensors(model), config_of(model), folder)
    return folder


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


# --- disks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [(), ("--verify",)], ids=["convert", "verify"])
def test_a_source_that_fails_while_it_is_read_is_named(
    model: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """Not the target: its disk is whole, and what was written is kept."""
    target = tmp_path / "mg"
    real = os.preadv

    def finished() -> int:
        return len(list(tmp_path.glob(".mg.converting-*/iter_*/*/*.pt")))

    def preadv(*args: Any) -> int:
        if not flags or finished() == 2:  # written, now compared
            raise OSError(errno.EIO, "Input/output error")
        return real(*args)

    with (
        mock.patch.object(sources.os, "preadv", preadv),
        pytest.raises(UnreadableError, match=r"model\.safetensors") as caught,
    ):
        hf_to_mg(model, target, [*TP2, "--workers", "1", *flags])
    assert "--save-dir" not in str(caught.value)
    assert not target.exists() and finished() == (2 if flags else 0)
    said = hf_to_mg(model, target, TP2)
    assert any(line.startswith("resumed: ") for line in said) == bool(flags)


def test_space_is_checked_before_anything_is_written(model: Path, tmp_path: Path) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    with (
        mock.patch.object(shutil, "disk_usage", return_value=usage),
        pytest.raises(OSError, match="--save-dir"),
    ):
        hf_to_mg(model, tmp_path / "mg", TP2)
    assert not (tmp_path / "mg").exists()


def test_verify_finds_a_bit_that_was_lost(model: Path, tmp_path: Path) -> None:
    real = command.verify

    def lossy(source: Source, result: Source, target: Target, workers: int) -> None:
        (path,) = result.files
        with path.open("r+b") as file:
            file.seek(-5, os.SEEK_END)
            byte = file.read(1)
            file.seek(-5, os.SEEK_END)
            file.write(bytes([byte[0] ^ 1]))
        real(source, result, target, workers)

    target = tmp_path / "hf"
    flags = ("--save-model-type", "hf", "--load-dir", model, "--save-dir", target, "--verify")
    with (
        mock.patch.object(command, "verify", lossy),
        pytest.raises(ValueError, match="--verify: 1 of 93"),
    ):
        convert(*flags)
    assert not list(tmp_path.iterdir()), "wrong files must not be taken up again"


# --- files ----------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 64)


def first_file(folder: Path) -> Path:
    return min(folder.glob("iter_*/*/model_optim_rng.pt"))


RANK = "iter_0000001/mp_rank_01_001_001"


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda f: cut(first_file(f)), "model_optim_rng.pt"),
        (lambda f: first_file(f).write_bytes(b"x" * 999), "model_optim_rng.pt"),
        (lambda f: first_file(f).unlink(), "mp_rank_00_000_000"),
        (lambda f: shutil.rmtree(first_file(f).parent), "pipeline stages"),
        (lambda f: shutil.rmtree(f / RANK), "mp_rank_01_001_001"),
        (lambda f: (f / RANK).rename(f / RANK[:-4]), "several layouts"),
        (lambda f: (f / "latest_checkpointed_iteration.txt").write_text("7"), "--load-dir"),
        (lambda f: (f / "latest_checkpointed_iteration.txt").write_bytes(b"\xff"), "--load-dir"),
    ],
)
def test_damaged_classic_files(
    classic: Path, model: Path, damage: Callable[[Path], object], named: str, tmp_path: Path
) -> None:
    folder = copied(classic, tmp_path / "mg")
    damage(folder)
    with pytest.raises(UsageError, match=named):
        mg_to_hf(folder, model, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("content", [b"{", b"\xff"])
def test_a_description_of_a_distributed_checkpoint_that_is_no_json(
    model: Path, content: bytes, tmp_path: Path
) -> None:
    (tmp_path / "mg").mkdir()
    for name in ("metadata.json", ".metadata"):
        (tmp_path / "mg" / name).write_bytes(content)
    with pytest.raises(UsageError, match=r"metadata\.json"):
        mg_to_hf(tmp_path / "mg", model, tmp_path / "hf")


class Makes:
    """What a pickle of a stranger may do: it makes a folder when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self._folder),)


def test_an_index_that_would_run_code_is_refused(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mg"
    folder.mkdir()
    kind = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(kind))
    (folder / "common.pt").touch()
    (folder / ".metadata").write_bytes(pickle.dumps(Makes(tmp_path / "ran")))
    with pytest.raises(UsageError, match=r"\.metadata is no index of tensors"):
        mg_to_hf(folder, model, tmp_path / "hf")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "changes",
    [{"num_hidden_layers": 5}, {"hidden_size": 64}, {"n_shared_experts": 0}, {"vocab_size": 500}],
    ids=str,
)
def test_classic_files_of_another_model(
    classic: Path, model: Path, changes: dict[str, int], tmp_path: Path
) -> None:
    config = copied(model, tmp_path / "config")
    edit_config(config, **changes)
    with pytest.raises(UsageError, match=r"config\.json"):
        mg_to_hf(classic, config, tmp_path / "hf")


def test_damaged_and_foreign_hf_files(model: Path, tmp_path: Path) -> None:
    folder, weights = copied(model, tmp_path / "hf"), hf_tensors(model)
    norm = "model.norm.weight"
    cut(folder / "model.safetensors")
    for named, changed in (
        ("model.safetensors", None),
        ("extra.weight", weights | {"extra.weight": torch.ones(1)}),
        (norm, weights | {norm: weights[norm].to(torch.float8_e4m3fn)}),
    ):
        if changed:
            save_file(changed, folder / "model.safetensors")
        with pytest.raises(UsageError, match=named):
            hf_to_mg(folder, tmp_path / "mg", TP2)


def test_mtp_with_an_embedding_of_its_own_is_refused(model: Path, tmp_path: Path) -> None:
    folder = copied(model, tmp_path / "hf")
    add_mtp(folder)
    weights = hf_tensors(folder)
    weights["model.layers.4.embed_tokens.weight"] += 1
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(UsageError, match=r"layers\.4\.embed_tokens\.weight"):
        hf_to_mg(folder, tmp_path / "mg", [*TP2, "--mtp-num-layers", "1"])


# --- flags ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        "--model-type-hf qwen3",
        "--model-type-hf bloom",
        "--num-layers 5",
        "--first-k-dense-replace 3",
        "--mtp-num-layers 1",
        "--expert-tensor-parallel-size 4",
        "--target-tensor-parallel-size 3",
        "--target-pipeline-parallel-size 3",
        "--target-expert-parallel-size 3",
        "--num-layer-list 1,2",
        "--moe-tp-extend-ep --expert-tensor-parallel-size 4",
        "--qlora-nf4",
        "--schedules-method dualpipev",
        "--save-dir MODEL",
        "--load-dir /nowhere",
        "--save-dir=",
        "--load-model-type mg",
    ],
)
def test_flags_that_do_not_fit(model: Path, flags: str, tmp_path: Path) -> None:
    """The message names the flag; a Megatron source lacks --hf-cfg-dir."""
    argv = flags.replace("MODEL", str(model)).split()
    named = "--hf-cfg-dir" if flags == "--load-model-type mg" else argv[0].rstrip("=")
    with pytest.raises(UsageError, match=named):
        hf_to_mg(model, tmp_path / "mg", [*TP2, *argv])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (2, 2), (64, 4)])
def test_threads_by_default_stay_within_the_documented_memory(cores: int, workers: int) -> None:
    flags = ["--load-dir", "a", "--save-dir", "b", "--load-model-type", "hf",
             "--save-model-type", "mg"]  # fmt: skip
    with mock.patch.object(os, "sched_getaffinity", return_value=set(range(cores))):
        assert parse_options(flags).work.num_threads == workers


def test_formats_that_are_confused(model: Path, classic: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--load-model-type hf"):
        mg_to_hf(model, model, tmp_path / "out")
    folder = copied(classic, tmp_path / "mg")
    shutil.copy(model / "config.json", folder)
    with pytest.raises(UsageError, match="--load-model-type mg"):
        hf_to_mg(folder, tmp_path / "out", TP2)


def test_nothing_is_replaced(model: Path, tmp_path: Path) -> None:
    (tmp_path / "mg").mkdir()
    (tmp_path / "mg" / "precious").write_text("data")
    with pytest.raises(UsageError, match="--save-dir"):
        hf_to_mg(model, tmp_path / "mg", TP2)
    assert (tmp_path / "mg" / "precious").read_text() == "data"


@pytest.mark.parametrize(
    ("error", "status"), [(UsageError("x"), 2), (UnreadableError("x"), 2), (OSError("x"), 1)]
)
def test_mistakes_and_disks_end_the_tool_with_a_line(
    error: Exception, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["convert_checkpoint"])
    monkeypatch.setattr(tool, "parse_options", mock.Mock(side_effect=error))
    assert tool.main() == status


def test_a_bug_of_the_tool_is_no_mistake_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["convert_checkpoint"])
    monkeypatch.setattr(tool, "parse_options", mock.Mock(side_effect=ValueError))
    with pytest.raises(ValueError) as caught:
        tool.main()
    assert not isinstance(caught.value, UsageError)
