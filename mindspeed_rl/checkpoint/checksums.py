"""Checksums of the files of a checkpoint: made while they are written, compared when they are read.

A record names each file with its size and its digest. Checkpoints of older versions and converted
ones have sizes alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mindspeed_rl.core.digest import file_digest, running_digest

# What is written at once. Linux takes several times as long for blocks that leave the caches of a
# core, and whatever else the process does waits meanwhile for memory.
_BLOCK_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class FileMark:
    """What a record says of a file.

    Attributes:
        size_bytes: Size of the file.
        xxh3: Digest of its bytes, see :func:`core.digest.file_digest`; empty: not known.
    """

    size_bytes: int
    xxh3: str = ""

    @classmethod
    def of(cls, path: Path) -> FileMark:
        """Read a file and return its mark. Local."""
        return cls(path.stat().st_size, file_digest(path))

    @classmethod
    def from_json(cls, value: Any) -> FileMark:
        """Return the mark that :meth:`to_json` gave, or that of a record with sizes alone.

        Raises:
            ValueError: The value is no mark.
        """
        if isinstance(value, int):
            return cls(value)
        match value:
            case {"bytes": int(size_bytes), "xxh3": str(digest)} if digest:
                return cls(size_bytes, digest)
        raise ValueError(f"{value!r} is no size and checksum")

    def to_json(self) -> dict[str, Any] | int:
        """Return the mark as plain types."""
        return {"bytes": self.size_bytes, "xxh3": self.xxh3} if self.xxh3 else self.size_bytes


class HashingFile:
    """A file that is written from its first to its last byte, and whose digest is then known.

    ``torch.save`` takes it as its target. After a write that fails, later bytes are dropped,
    because torch ends in an error of its own if one is raised in the middle of an archive;
    :meth:`check` raises it.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._state = running_digest()
        self._num_bytes = 0
        self._error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes and return their number."""
        view = memoryview(data).cast("B")
        for start in range(0, view.nbytes, _BLOCK_BYTES):
            if self._error is not None:
                break
            block = view[start : start + _BLOCK_BYTES]
            try:
                self._file.write(block)
            except OSError as error:
                self._error = error
            self._state.update(block)
        self._num_bytes += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        """Return the number of bytes that were written."""
        return self._num_bytes

    def flush(self) -> None:
        """Do nothing; :meth:`finish` brings all bytes to the disk."""

    def check(self) -> None:
        """Raise the error of an earlier write.

        Raises:
            OSError: Some bytes could not be written.
        """
        if self._error is not None:
            raise self._error

    def finish(self) -> FileMark:
        """Flush the file to disk and return its mark.

        Raises:
            OSError: Some bytes could not be written.
        """
        self.check()
        self._file.flush()
        os.fsync(self._file.fileno())
        return FileMark(self._num_bytes, self._state.hexdigest())


def share_of_files(marks: Mapping[str, FileMark], rank: int, world: int) -> list[str]:
    """Return the files with a checksum that a rank compares, so that each is read once. Local.

    The largest file goes first, each to the rank with the fewest bytes so far.
    """
    names = sorted((n for n, m in marks.items() if m.xxh3), key=lambda n: -marks[n].size_bytes)
    loads = [0] * world
    mine = []
    for name in names:
        lightest = loads.index(min(loads))
        loads[lightest] += marks[name].size_bytes
        if lightest == rank:
            mine.append(name)
    return mine


def compare(
    folder: Path, marks: Mapping[str, FileMark], names: Sequence[str], threads: int = 1
) -> list[str]:
    """Read files of a checkpoint and describe each that is not what the record says. Local.

    Args:
        folder: Folder of the checkpoint.
        marks: Marks of the record by path in the folder.
        names: Files to read; each has a checksum.
        threads: Number of files that are read at the same time.
    """

    def problem(name: str) -> str:
        try:
            found = file_digest(folder / name)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror or error})"
        if found == marks[name].xxh3:
            return ""
        return f"{name} is damaged: xxh3 {found} instead of {marks[name].xxh3}"

    with ThreadPoolExecutor(threads) as pool:
        return [text for text in pool.map(problem, names) if text]
