"""Checksums of checkpoint files: made on the way to disk, and every changed byte is found."""

from __future__ import annotations

import argparse
import errno
import io
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.full_disk import largest_file

from mindspeed_rl.checkpoint import metadata_files, newest_sound, resume
from mindspeed_rl.checkpoint.archives import write_archives
from mindspeed_rl.checkpoint.checksums import FileMark, compare, share_of_files
from mindspeed_rl.checkpoint.full_disk import named_disk
from mindspeed_rl.checkpoint.inspection import Verdict, inspect_checkpoints
from mindspeed_rl.core.digest import file_digest
from mindspeed_rl.core.errors import UsageError

from .test_resume import make_record, save


def flip(path: Path, position: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def test_a_file_is_hashed_on_its_way_and_its_archives_load(tmp_path: Path) -> None:
    tensors = [torch.arange(5.0), torch.ones(3, 2, dtype=torch.bfloat16), torch.zeros(0)]
    raw = io.BytesIO()
    torch.save({"a": 7}, raw)
    path = tmp_path / "__0_0.distcp"
    written = write_archives(path, [raw, *tensors])
    assert written.mark == FileMark(path.stat().st_size, file_digest(path))
    content = path.read_bytes()
    found = [torch.load(io.BytesIO(content[at : at + size])) for at, size in written.places]
    assert found[0] == {"a": 7}
    for tensor, one in zip(tensors, found[1:], strict=True):
        assert tensor.dtype == one.dtype and torch.equal(tensor, one)
    assert sum(size for _, size in written.places) == len(content)


def test_a_full_disk_is_told_with_path_and_bytes(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    path = tmp_path / "__0_0.distcp"
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"__0_0\.distcp: .*the file needs 8\.0 MiB") as told:
        write_archives(path, [torch.ones(2 << 20)])
    assert told.value.errno == errno.ENOSPC


@pytest.mark.parametrize("by_library", [False, True])
def test_a_save_that_fills_the_disk_leaves_the_earlier_checkpoint(
    tmp_path: Path, by_library: bool
) -> None:
    """The kernel refuses the bytes; the next start removes what was written."""
    earlier = save(tmp_path, 2)
    partial = resume.begin(tmp_path, 4, needed_bytes=0)
    told = rf"--save {tmp_path}: the checkpoint of step 4 .* needs about 10\.0 MiB, .* are free"
    with pytest.raises(OSError, match=told) as error, named_disk(str(tmp_path), 4, 10 << 20):
        try:
            with largest_file(1 << 20):
                write_archives(partial / "__0_0.distcp", [torch.ones(2 << 20)])
        except OSError:
            if by_library:
                raise RuntimeError("basic_ios::clear: iostream error") from None
            raise
    assert error.value.errno == errno.ENOSPC
    found = resume.find_latest(tmp_path)
    assert found.path == earlier and "its save did not finish" in found.ignored[0]
    assert resume.sweep(tmp_path) == [partial] and not partial.exists()
    assert resume.find_latest(tmp_path).ignored == ()


def test_each_file_with_a_checksum_is_read_by_one_rank() -> None:
    marks = {f"file{n}": FileMark(1 + n * n, "digest") for n in range(9)} | {"old": FileMark(5)}
    for world in (1, 2, 4, 16):
        shares = [share_of_files(marks, rank, world) for rank in range(world)]
        assert sorted(name for share in shares for name in share) == sorted(set(marks) - {"old"})
        loads = [sum(marks[name].size_bytes for name in share) for share in shares]
        assert max(loads) <= max(65, sum(loads) / world + 65)


def test_a_changed_file_is_named_with_both_checksums(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    marks = resume.marks_of(path)
    assert set(marks) == {"tensors.distcp", "nested/common.pt"}
    assert compare(path, marks, list(marks)) == []
    flip(path / "tensors.distcp", 50, bit=6)
    (problem,) = compare(path, marks, list(marks), threads=2)
    expected, found = marks["tensors.distcp"].xxh3, file_digest(path / "tensors.distcp")
    assert "tensors.distcp is damaged" in problem and expected in problem and found in problem
    assert not resume.damage_of(path), "its size is right"


def test_every_changed_byte_of_a_record_is_found(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    sound = (path / resume.RECORD).read_bytes()
    assert resume.damage_of(path) == ""
    for position in range(0, len(sound), 3):
        flip(path / resume.RECORD, position, bit=position % 8)
        assert resume.damage_of(path).startswith(f"{resume.RECORD} is broken"), position
        (path / resume.RECORD).write_bytes(sound)


def test_marks_of_the_writers_are_kept_and_other_files_are_read(tmp_path: Path) -> None:
    partial = resume.begin(tmp_path, 3, needed_bytes=0)
    (partial / "theirs").write_bytes(b"abc")
    (partial / "mine").write_bytes(b"abc")
    path = resume.commit(tmp_path, make_record(3), {"theirs": FileMark(3, "as told")})
    marks = resume.marks_of(path)
    assert marks["theirs"] == FileMark(3, "as told")
    assert marks["mine"] == FileMark(3, file_digest(path / "mine"))


class Runs:
    """Creates a file when it is unpickled, as a stranger's index might do worse."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return (os.mkdir, (str(self.path),))


def write_folder(folder: Path, index: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    torch.save({"step": 1}, folder / "common.pt")
    return folder


def index_of(file: str) -> object:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    size = torch.Size((2,))
    entry = TensorStorageMetadata(
        TensorProperties(torch.bfloat16), size, [ChunkStorageMetadata(torch.Size((0,)), size)]
    )
    return Metadata({"w": entry}, storage_data={MetadataIndex("w"): _StorageInfo(file, 0, 10)})


def test_an_index_is_read_without_running_what_it_names(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "iter_0000001", index_of("__0_0.distcp"))
    (folder / "__0_0.distcp").write_bytes(b"0123456789")
    assert metadata_files.problem_of_metadata(folder) == ""
    found = metadata_files.read_index(folder / ".metadata")
    assert found.state_dict_metadata["w"].properties.dtype == torch.bfloat16
    for attack in (Runs(tmp_path / "ran"), {"a": print}, pickle.Unpickler):
        (folder / ".metadata").write_bytes(pickle.dumps(attack))
        assert "metadata cannot be read" in metadata_files.problem_of_metadata(folder)
    # A name with a dot reaches whatever a module imports.
    (folder / ".metadata").write_bytes(
        b"\x80\x04\x8c\x28torch.distributed.checkpoint.filesystem\x8c\x08os.mkdir\x93."
    )
    with pytest.raises(ValueError, match="is no index of tensors"):
        metadata_files.read_index(folder / ".metadata")
    assert not (tmp_path / "ran").exists()


def test_the_arguments_of_a_run_are_read_and_other_objects_are_not(tmp_path: Path) -> None:
    """As Megatron-LM saves them beside the tensors; its own loader reads them in the same block."""
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
    from megatron.core.transformer.enums import AttnBackend

    folder = write_folder(tmp_path / "iter_0000001", index_of("__0_0.distcp"))
    (folder / "__0_0.distcp").write_bytes(b"0123456789")
    args = argparse.Namespace(attention_backend=AttnBackend.fused, params_dtype=torch.bfloat16)
    torch.save({"iteration": 7, "args": args}, folder / "common.pt")
    assert metadata_files.problem_of_metadata(folder) == ""
    with newest_sound.plain_objects_only(folder):
        found = TorchCommonLoadStrategy().load_common(folder)
    assert found["args"].params_dtype is torch.bfloat16
    # megatron-core's own classes where it has registered them
    fused = AttnBackend.fused
    assert found["args"].attention_backend in (fused, (fused.value,))
    torch.save({"args": Runs(tmp_path / "ran")}, folder / "common.pt")
    assert "metadata cannot be read" in metadata_files.problem_of_metadata(folder)
    with newest_sound.plain_objects_only(folder), pytest.raises(pickle.UnpicklingError):
        TorchCommonLoadStrategy().load_common(folder)
    assert not (tmp_path / "ran").exists()


def test_objects_among_the_tensors_run_nothing(tmp_path: Path) -> None:
    """torch's planner unpickles them with ``weights_only=False``."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    folder = write_folder(tmp_path / "iter_0000001", index_of("__0_0.distcp"))
    stored = io.BytesIO()
    torch.save(Runs(tmp_path / "ran"), stored)
    planner: Any = DefaultLoadPlanner(flatten_state_dict=False)
    planner.state_dict = {}
    item: Any = SimpleNamespace(dest_index=SimpleNamespace(fqn="w"))
    with newest_sound.plain_objects_only(folder), pytest.raises(pickle.UnpicklingError):
        planner.load_bytes(item, io.BytesIO(stored.getvalue()))
    assert not (tmp_path / "ran").exists()
    planner.load_bytes(item, io.BytesIO(stored.getvalue()))
    assert (tmp_path / "ran").exists(), "it runs outside of the block, so that the test can fail"


@pytest.mark.parametrize("file", ["../other/__0_0.distcp", "/etc/passwd", ".."])
def test_an_index_names_files_of_its_own_folder_only(tmp_path: Path, file: str) -> None:
    folder = write_folder(tmp_path / "iter_0000001", index_of(file))
    with pytest.raises(ValueError, match="which is no file of its folder"):
        metadata_files.read_index(folder / ".metadata")


def test_damaged_metadata_is_described_whatever_byte_changed(tmp_path: Path) -> None:
    """Without checksums a changed byte may go unseen, but never ends in another error."""
    folder = write_folder(tmp_path / "iter_0000001", index_of("__0_0.distcp"))
    assert "__0_0.distcp, which .metadata names" in metadata_files.problem_of_metadata(folder)
    (folder / "__0_0.distcp").write_bytes(b"0123456789")
    found = 0
    for name in ("metadata.json", ".metadata", "common.pt"):
        sound = (folder / name).read_bytes()
        for position in range(0, len(sound), 1 + len(sound) // 150):
            flip(folder / name, position, bit=position % 8)
            found += bool(metadata_files.problem_of_metadata(folder))
            (folder / name).write_bytes(sound)
    assert found > 50


def test_the_doctor_finds_what_is_damaged(tmp_path: Path) -> None:
    partial = resume.begin(tmp_path, 2, needed_bytes=0)
    write_folder(partial, index_of("__0_0.distcp"))
    (partial / "__0_0.distcp").write_bytes(b"0123456789")
    first = resume.commit(tmp_path, make_record(2))
    (finding,) = inspect_checkpoints(first)
    assert finding.verdict is Verdict.SOUND and "4 files" in finding.text
    save(tmp_path, 4)  # without metadata: nobody can load it
    sound, *others = inspect_checkpoints(tmp_path)
    assert sound.verdict is Verdict.SOUND and {f.verdict for f in others} == {Verdict.DAMAGED}
    flip(first / "__0_0.distcp", 3)
    flip(first / "common.pt", 100)
    found = [f.text for f in inspect_checkpoints(first)]
    assert len(found) == 2 and any("common.pt is damaged" in text for text in found)
    with pytest.raises(UsageError, match="--checkpoint"):
        inspect_checkpoints(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="neither a checkpoint"):
        inspect_checkpoints(tmp_path / "empty")


def test_the_doctor_tells_a_lost_record_from_a_checkpoint_of_another_tool(tmp_path: Path) -> None:
    foreign = write_folder(tmp_path / "other" / "iter_0000009", index_of("metadata.json"))
    (finding,) = inspect_checkpoints(foreign)
    assert finding.verdict is Verdict.UNKNOWN and "another tool" in finding.text
    # Megatron-LM keeps the step in a file of that name, and the arguments of its run.
    (foreign.parent / resume.TRACKER).write_text("9")
    torch.save({"args": argparse.Namespace(lr=1.0)}, foreign / "common.pt")
    (finding,) = inspect_checkpoints(foreign)
    assert finding.verdict is Verdict.UNKNOWN, finding.text

    folder = tmp_path / "own"
    for step in (2, 4):
        partial = resume.begin(folder, step, needed_bytes=0)
        write_folder(partial, index_of("metadata.json"))
        last = resume.commit(folder, make_record(step))
    (last / resume.RECORD).unlink()
    sound, lost = inspect_checkpoints(folder)
    assert sound.verdict is Verdict.SOUND and lost.verdict is Verdict.DAMAGED
    assert "checkpoint.json is missing" in lost.text and "iter_0000002 beside it" in lost.text
    (folder / "iter_0000002" / resume.RECORD).unlink()  # only the file with the newest step is left
    found = inspect_checkpoints(folder)
    assert [f.verdict for f in found] == [Verdict.DAMAGED] * 2
    assert resume.TRACKER in found[0].text


def test_a_rank_that_reads_much_hashes_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(32)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert [newest_sound.threads_for(n) for n in (0, 2**27, 2**28, 2**40)] == [1, 1, 2, 4]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert newest_sound.threads_for(2**40) == 1
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert newest_sound.threads_for(2**40) == 8
