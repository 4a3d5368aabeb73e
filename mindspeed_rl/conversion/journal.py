"""What of a conversion is on disk: a kill at any moment loses at most what was being written.

Layout, beside the target ``DIR``::

    .DIR.converting/journal     one line with what is converted; then "file tensor crc" for each
                                tensor whose bytes are on disk
    .DIR.converting/out/...     the files, at their final sizes, with holes

``out`` is renamed to ``DIR`` when everything is on disk; then the folder is removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import IO

from mindspeed_rl.checkpoint.resume import sync_path
from mindspeed_rl.conversion.source import Source
from mindspeed_rl.conversion.target import Target


def fingerprint(source: Source, target: Target) -> str:
    """Differs between conversions that would write other bytes: sources by size and time."""
    digest = hashlib.sha256()
    for path in source.files:
        status = path.stat()
        digest.update(repr((str(path), status.st_size, status.st_mtime_ns)).encode())
    for file in target.files:
        digest.update(repr((file.path, file.num_bytes, file.offsets, file.tensors)).encode())
    digest.update(repr(sorted(target.small.items())).encode())
    return digest.hexdigest()


class Journal:
    """The folder of one conversion, as a context manager; one process at a time has it.

    Args:
        target: directory that the conversion makes.
        identity: :func:`fingerprint`; what another one left is removed.
        sizes: bytes of the files, by their paths in the target.

    Raises:
        ValueError: the target exists, or another process converts into it.
    """

    def __init__(self, target: Path, identity: str, sizes: Mapping[str, int]) -> None:
        self._target = target
        self._identity = identity
        self._sizes = sizes
        self._folder = target.with_name(f".{target.name}.converting")
        self._lock = Lock()
        self._file: IO[str] | None = None
        #: (file, tensor) -> CRC-32 of what is on disk
        self.done: dict[tuple[int, int], int] = {}
        #: an earlier attempt gave the target its name, and was killed before it removed the folder
        self.named = False

    @property
    def out(self) -> Path:
        """Where the files are written."""
        return self._folder / "out"

    def __enter__(self) -> Journal:
        if not self._folder.is_dir():  # nothing is made beside what exists
            refuse_existing(self._target)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = (self._folder / "journal").open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise ValueError(
                f"--save-dir {self._target}: another process is converting into it; wait for it, "
                "or choose another directory"
            ) from error
        try:
            self._resume(self._file)
        except BaseException:
            self._file.close()
            raise
        return self

    def _resume(self, file: IO[str]) -> None:
        file.seek(0)
        first, *lines = file.read().split("\n") or [""]
        ours = first == self._head()
        self.named = ours and not self.out.is_dir() and self._is_there()
        if not self.named:
            refuse_existing(self._target)
        # without the files the notes are about a target that was named and taken away
        if self.named or (ours and self.out.is_dir()):
            for line in lines[:-1]:  # the last is cut off, or empty
                number, tensor, crc = map(int, line.split())
                self.done[number, tensor] = crc
            # a line that a kill cut off must not join the next one
            file.truncate(sum(len(line) + 1 for line in (first, *lines[:-1])))
            file.seek(0, os.SEEK_END)
            return
        shutil.rmtree(self.out, ignore_errors=True)
        file.seek(0)
        file.truncate()
        self.out.mkdir()
        self._write([self._head()])

    def _is_there(self) -> bool:
        """Whether the target has all files; they were on disk before it got its name."""
        files = ((self._target / path, size) for path, size in self._sizes.items())
        return all(file.is_file() and file.stat().st_size == size for file, size in files)

    def _head(self) -> str:
        return json.dumps({"version": 1, "identity": self._identity})

    def _write(self, lines: Iterable[str]) -> None:
        assert self._file is not None
        self._file.write("".join(f"{line}\n" for line in lines))
        self._file.flush()
        os.fsync(self._file.fileno())

    def record(self, tensors: Mapping[tuple[int, int], int]) -> None:
        """Note tensors whose bytes are on disk; from any thread."""
        with self._lock:
            self._write(f"{file} {tensor} {crc}" for (file, tensor), crc in tensors.items())
            self.done.update(tensors)

    def commit(self) -> None:
        """Give the files, which are all on disk, the name of the target."""
        for folder, _, _ in os.walk(self.out):
            sync_path(Path(folder))
        os.rename(self.out, self._target)  # over an empty directory at most
        sync_path(self._target.parent)

    def discard(self) -> None:
        """Forget what is written: it is wrong."""
        (self._folder / "journal").unlink()  # first, so that a kill leaves no notes of lost files
        shutil.rmtree(self._folder)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._file is not None
        if error is None:
            shutil.rmtree(self._folder)
        self._file.close()


def refuse_existing(target: Path) -> None:
    """A conversion replaces nothing.

    Raises:
        ValueError: ``target`` exists and is not an empty directory.
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(
            f"--save-dir {target} exists and is not empty; a conversion replaces nothing: choose "
            "another directory, or remove it"
        )
