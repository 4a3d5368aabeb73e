"""Execution of a conversion: workers fill files block by block and rename finished files.

Files are written into ``.NAME.converting-IDENTITY`` next to the target ``NAME``, as ``FILE.part``
until all of a file is on disk. The folder is renamed to the target when every file is there, so the
target is complete or absent. After a kill, the same conversion keeps the files that have their
final names. Leftovers of other conversions are removed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock

import torch

from mindspeed_rl.convert.source import Source, bytes_of, row_blocks
from mindspeed_rl.convert.target import OutputFile, OutputTensor, Target
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.files import sync_path

# Space to leave free on the disk in addition to the tensors.
_MARGIN_BYTES = 64 << 20


def convert(
    source: Source,
    target: Target,
    directory: Path,
    *,
    workers: int,
    advance: Callable[[int], None],
    check: Callable[[Path], None],
) -> int:
    """Write all files of ``target`` and rename the directory, or resume a killed conversion. Local.

    Args:
        source: Checkpoint to read.
        target: Checkpoint to write.
        directory: Directory of the target; it appears when everything is on disk, never before.
        workers: Threads; each writes a file and holds about one block of a tensor at a time.
        advance: Function that receives the bytes written, those of an earlier attempt first.
        check: Function that checks the finished files before the directory is renamed.

    Returns:
        Bytes of tensors in the files that an earlier attempt had finished.

    Raises:
        UsageError: The target exists, or a source cannot be read.
        OSError: The disk is full; the same command resumes when there is space.
    """
    refuse_existing(directory)
    with _work_folder(directory, _identity(source, target)) as out:
        finished = [file for file in target.files if (out / file.path).is_file()]
        kept = sum(file.num_bytes for file in finished)
        _check_space(target.num_bytes, kept, directory, out)
        advance(kept)
        missing = [file for file in target.files if file not in finished]
        with _explained(directory, out):
            _write_files(_Writer(source, out, advance), missing, workers)
            for path, data in target.small.items():
                (out / path).parent.mkdir(parents=True, exist_ok=True)
                (out / path).write_bytes(data)
                sync_path(out / path)
            _check(check, out)
            for folder, _, _ in os.walk(out):
                sync_path(Path(folder))
            os.rename(out, directory)  # This replaces an empty directory at most.
            sync_path(directory.parent)
        return kept


def refuse_existing(target: Path) -> None:
    """Refuse to replace an existing target.

    Raises:
        UsageError: ``target`` exists and is not an empty directory.
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UsageError(
            f"--save-dir {target} exists and is not empty; a conversion replaces nothing: choose "
            "another directory, or remove it"
        )


def _identity(source: Source, target: Target) -> str:
    """Hash what decides the bytes of a conversion; sources count by size and time."""
    digest = hashlib.sha256()
    for path in source.files:
        status = path.stat()
        digest.update(repr((str(path), status.st_size, status.st_mtime_ns)).encode())
    for file in target.files:
        digest.update(repr((file.path, file.tensors)).encode())
    digest.update(repr(sorted(target.small.items())).encode())
    return digest.hexdigest()[:16]


@contextmanager
def _work_folder(target: Path, identity: str) -> Iterator[Path]:
    """Lock the folder of this conversion for this process, and remove those of other conversions.

    Raises:
        UsageError: Another process converts into the target.
    """
    prefix = f".{target.name}.converting-"
    folder = target.with_name(prefix + identity)
    folder.mkdir(parents=True, exist_ok=True)
    folders = [path for path in target.parent.iterdir() if path.name.startswith(prefix)]
    for found in sorted(folders, key=lambda path: path == folder):
        descriptor = os.open(found, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if found == folder:
                yield folder
            else:
                shutil.rmtree(found)
        except BlockingIOError as error:
            raise UsageError(
                f"--save-dir {target}: another process is converting into it; wait for it, or "
                "choose another directory"
            ) from error
        finally:
            os.close(descriptor)


def _check(check: Callable[[Path], None], out: Path) -> None:
    """Check the finished files; remove wrong ones, so that the next attempt cannot keep them."""
    try:
        check(out)
    except UsageError:  # An UnreadableError says nothing about the result.
        wrong = out.with_name(out.name.rpartition("-")[0] + "-wrong")
        os.rename(out, wrong)  # A kill within rmtree must not leave wrong files to be resumed.
        shutil.rmtree(wrong)
        raise


@contextmanager
def _explained(directory: Path, out: Path) -> Iterator[None]:
    """Explain errors of the file system by what they mean for the conversion."""
    try:
        yield
    except OSError as error:
        raise OSError(
            error.errno,
            f"--save-dir {directory}: {error.strerror or error}. Nothing has that name yet; "
            f"finished files are kept beside it in {out.name}: free space or repair the disk and "
            "give the same command again to go on, or remove that folder",
        ) from error


def _check_space(num_bytes: int, kept: int, directory: Path, out: Path) -> None:
    """Check that the disk has room for the files that are not there yet."""
    free = shutil.disk_usage(out).free
    if num_bytes + _MARGIN_BYTES - kept > free:
        raise OSError(
            errno.ENOSPC,
            f"--save-dir {directory}: the checkpoint takes {num_bytes / 2**30:.2f} GiB "
            f"({kept / 2**30:.2f} are written) and {free / 2**30:.2f} GiB are free; free space "
            "or choose another disk. Nothing was written",
        )


def _write_files(writer: _Writer, files: list[OutputFile], workers: int) -> None:
    with ThreadPoolExecutor(max_workers=workers) as pool:
        running = [pool.submit(writer.write, file) for file in files]
        try:
            done, _ = wait(running, return_when=FIRST_EXCEPTION)
        finally:
            writer.stop.set()
            pool.shutdown(cancel_futures=True)
    for future in done:
        future.result()


@dataclass(frozen=True)
class _Writer:
    """Writes one file at a time in each thread that calls it.

    Attributes:
        source: Checkpoint to read.
        out: Folder of the files.
        advance: Function that receives the bytes of tensors that are written.
        stop: Event that is set when the files are no longer wanted.
    """

    source: Source
    out: Path
    advance: Callable[[int], None]
    stop: Event = field(default_factory=Event)
    lock: Lock = field(default_factory=Lock)

    def write(self, file: OutputFile) -> None:
        """Write a file and rename it when all of it is on disk."""
        path = self.out / file.path
        part = path.with_name(path.name + ".part")
        path.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)
        offsets = file.frame(part)
        descriptor = os.open(part, os.O_WRONLY)
        try:
            for tensor, offset in zip(file.tensors, offsets, strict=True):
                self._write_tensor(descriptor, tensor, offset)
            if self.stop.is_set():
                return
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        part.rename(path)

    def _write_tensor(self, descriptor: int, tensor: OutputTensor, position: int) -> None:
        values = torch.empty(0, dtype=tensor.dtype)
        for block in row_blocks(tensor.shape, tensor.dtype.itemsize):
            if self.stop.is_set():
                return
            if tuple(values.shape) != block.size:  # New memory costs as much as the copy into it.
                values = torch.empty(block.size, dtype=tensor.dtype)
            tensor.fill(self.source, block, values)
            data = bytes_of(values)
            size = len(data)
            while data:
                count = os.pwrite(descriptor, data, position)
                data, position = data[count:], position + count
            with self.lock:
                self.advance(size)
