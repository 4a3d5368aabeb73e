"""Files of copies in host memory: the state of one rank after one step.

Layout of a node's folder, which lies in shared memory and belongs to the starter of the node::

    rank00003-step0000012.state    bytes of the tensors, then the archive of plain values
    rank00003-step0000012.json     the record: where each tensor lies, checksums; written last

A copy is valid when its record is there. The first line of the record is the checksum of the rest.
"""

from __future__ import annotations

import errno
import io
import json
import math
import mmap
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from mindspeed_rl.checkpoint.checksums import FileMark, HashingFile
from mindspeed_rl.core.digest import file_digest, text_digest

_NAME = re.compile(r"rank(\d{5,})-step(\d{7,})\.json")
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, order=True)
class CopyId:
    """Whose state a copy is, and after which step."""

    step: int
    rank: int

    @property
    def name(self) -> str:
        return f"rank{self.rank:05d}-step{self.step:07d}"


@dataclass(frozen=True, slots=True)
class CopyRecord:
    """What a copy holds.

    Attributes:
        step: Step after which it was made.
        rank: Rank whose state it is.
        run: Digest of what must be the same where it is loaded: models, layout, optimizers.
        size_bytes: Bytes of the state.
        xxh3: Their digest.
        plain: Offset and length of the archive of plain values.
        tensors: Name -> dtype, shape and offset.
    """

    step: int
    rank: int
    run: str
    size_bytes: int
    xxh3: str
    plain: tuple[int, int]
    tensors: Mapping[str, tuple[str, tuple[int, ...], int]]

    @property
    def id(self) -> CopyId:
        return CopyId(self.step, self.rank)

    def to_text(self) -> str:
        """Return the record as JSON with its checksum in the first line."""
        body = json.dumps(asdict(self))
        return f"{text_digest(body)}\n{body}"

    @classmethod
    def from_text(cls, text: str) -> CopyRecord:
        """Read the text of a record.

        Raises:
            ValueError: It is damaged.
        """
        head, _, body = text.partition("\n")
        if text_digest(body) != head:
            raise ValueError("the record is damaged")
        fields = json.loads(body)
        tensors = {n: (d, tuple(shape), o) for n, (d, shape, o) in fields.pop("tensors").items()}
        return cls(**fields | {"plain": tuple(fields["plain"]), "tensors": tensors})


def write_copy(
    folder: Path,
    copy: CopyId,
    run: str,
    tensors: Mapping[str, torch.Tensor],
    plain: Mapping[str, Any],
) -> CopyRecord:
    """Write a copy; one tensor of a device at a time is brought to the host. Local.

    Args:
        folder: Folder of this node.
        copy: What is written.
        run: Digest of what must be the same where it is loaded.
        tensors: Tensors of the state, by name.
        plain: Values that ``torch.load`` builds without executing anything.

    Raises:
        OSError: There is no room; the message says how much is needed. Nothing is left of it.
    """
    archive = io.BytesIO()
    torch.save(dict(plain), archive)
    needed = sum(t.nbytes + _ALIGNMENT for t in tensors.values()) + archive.tell()
    with StateFile(folder, copy, needed) as file:
        places = {}
        for name, tensor in tensors.items():
            padding = -file.tell() % _ALIGNMENT
            file.write(bytes(padding))
            places[name] = (_dtype(tensor), tuple(tensor.shape), file.tell())
            file.write(_bytes(tensor))
        start = file.tell()
        file.write(archive.getbuffer())
        mark = file.mark()
    record = CopyRecord(
        copy.step, copy.rank, run, mark.size_bytes, mark.xxh3, (start, archive.tell()), places
    )
    write_record(folder, record)
    return record


class StateFile:
    """The file of a new copy, open for writing; an error inside its block removes it. Local.

    Args:
        folder: Folder of the node.
        copy: Copy that is written.
        needed: Bytes that it needs.

    Raises:
        OSError: There is no room, or a write failed.
    """

    def __init__(self, folder: Path, copy: CopyId, needed: int) -> None:
        self._path = folder / f"{copy.name}.state"
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise OSError(
                errno.ENOSPC,
                f"{folder.parent}: a copy needs {needed / 2**20:.1f} MiB of shared memory, "
                f"{free / 2**20:.1f} MiB are free",
            )
        self._raw: BinaryIO = os.fdopen(_create(self._path), "wb")
        self._file = HashingFile(self._raw)

    def __enter__(self) -> StateFile:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._raw.close()
        if kind is not None:
            self._path.unlink(missing_ok=True)

    def tell(self) -> int:
        """Return the number of bytes that were written."""
        return self._file.tell()

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes; an error is raised by :meth:`mark`."""
        self._file.write(data)

    def mark(self) -> FileMark:
        """Return size and digest.

        Raises:
            OSError: A write failed.
        """
        return self._file.finish()


def write_record(folder: Path, record: CopyRecord) -> None:
    """Make a copy valid whose state is written. Local.

    Raises:
        OSError: It cannot be written; nothing is left of the copy.
    """
    hidden = folder / f".{record.id.name}.json"
    try:
        with os.fdopen(_create(hidden), "w", encoding="utf-8") as file:
            file.write(record.to_text())
        hidden.rename(folder / f"{record.id.name}.json")
    except OSError:
        for path in (hidden, state_path(folder, record.id)):
            path.unlink(missing_ok=True)
        raise


def list_copies(folder: Path) -> dict[CopyId, str]:
    """Return the digests of runs of the valid copies in a folder. Local.

    Whether the bytes of a state are those that were written is not looked at.
    """
    found = {}
    for path in folder.iterdir():
        if _NAME.fullmatch(path.name):
            try:
                record = CopyRecord.from_text(path.read_text(encoding="utf-8"))
            except (OSError, ValueError, KeyError, TypeError):
                continue  # it is damaged, or removed at this moment
            found[record.id] = record.run
    return found


def read_record(folder: Path, copy: CopyId) -> CopyRecord:
    """Read the record of a copy.

    Raises:
        OSError, ValueError: It is not there, or damaged.
    """
    return CopyRecord.from_text((folder / f"{copy.name}.json").read_text(encoding="utf-8"))


def state_path(folder: Path, copy: CopyId) -> Path:
    """Return the path of the state of a copy."""
    return folder / f"{copy.name}.state"


def problem_of_copy(folder: Path, copy: CopyId) -> str:
    """Describe the damage of a copy, whose bytes are read; empty where it is sound. Local."""
    try:
        record = read_record(folder, copy)
        found = file_digest(state_path(folder, copy))
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{copy.name}: {error}"
    return "" if found == record.xxh3 else f"{copy.name}: xxh3 {found} instead of {record.xxh3}"


def read_copy(folder: Path, copy: CopyId) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors of a sound copy, which lie in its file, and its plain values. Local."""
    record = read_record(folder, copy)
    with state_path(folder, copy).open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    tensors = {}
    for name, (dtype, shape, offset) in record.tensors.items():
        kind, count = getattr(torch, dtype), math.prod(shape)
        flat = torch.empty(0, dtype=kind)
        if count:  # torch makes no empty tensor of a buffer
            flat = torch.frombuffer(content, dtype=kind, count=count, offset=offset)
        tensors[name] = flat.view(shape)
    start, length = record.plain
    archive = io.BytesIO(content[start : start + length])
    return tensors, torch.load(archive, weights_only=True, map_location="cpu")


def remove_all_but(folder: Path, kept: Iterable[int], rank: int | None = None) -> None:
    """Remove the copies of other steps than ``kept``, and what killed writes left. Local.

    Args:
        folder: Folder of the node.
        kept: Steps whose valid copies stay.
        rank: Rank whose files are looked at; ``None``: all.
    """
    steps = set(kept)
    whose = "*" if rank is None else f"rank{rank:05d}-*"
    for path in (*folder.glob(whose), *folder.glob(f".{whose}")):
        found = _NAME.fullmatch(f"{path.name.partition('.')[0]}.json")
        valid = bool(found) and path.with_suffix(".json").is_file()
        if not (found and valid and int(found[2]) in steps) and path.name != ".owner":
            path.unlink(missing_ok=True)


def _create(path: Path) -> int:
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
