"""Runs a conversion: workers fill tensors block by block and write them to their places."""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event

import torch

from mindspeed_rl.conversion.journal import Journal, fingerprint
from mindspeed_rl.conversion.source import Source, row_blocks
from mindspeed_rl.conversion.stored import UnreadableError, bytes_of
from mindspeed_rl.conversion.target import OutputFile, OutputTensor, Target

# A worker puts what it has written on disk, and notes it, after about this many bytes.
_SYNC_BYTES = 256 << 20
# Left free on the disk besides the files.
_MARGIN_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _Job:
    """One tensor to write: numbers of its file and of itself in it."""

    file: int
    tensor: int


def convert(
    source: Source,
    target: Target,
    directory: Path,
    *,
    workers: int,
    advance: Callable[[int], None],
    check: Callable[[Path], None] | None = None,
) -> int:
    """Write all files of ``target`` and name the directory, or go on where a kill ended it. Local.

    Args:
        source: what is read.
        target: what is written.
        directory: of the target; it appears when everything is on disk, never before.
        workers: threads; each holds about one block of a tensor at a time.
        advance: told the bytes that came to be on disk, those of an earlier attempt first.
        check: looks at the finished files before the directory gets its name.

    Returns:
        Bytes of tensors that an earlier attempt had written.

    Raises:
        ValueError: the target exists, or a source cannot be read.
        OSError: the disk is full; the same command goes on when there is space.
    """
    sizes = {file.path: file.num_bytes for file in target.files}
    with Journal(directory, fingerprint(source, target), sizes) as journal:
        kept = sum(_size(target.files[f].tensors[t]) for f, t in journal.done)
        if not journal.named:
            _check_space(target, directory, journal.out)
        advance(kept)
        if journal.named:
            if check is not None:
                check(directory)
            return kept
        with _told(directory):
            _allocate(target, journal.out)
            _run_jobs(source, target, journal, workers, advance)
            _finish(target, journal)
            if check is not None:
                _checked(check, journal)
            journal.commit()
        return kept


def _checked(check: Callable[[Path], None], journal: Journal) -> None:
    """Look at the finished files; wrong ones must not be taken up by the next attempt."""
    try:
        check(journal.out)
    except UnreadableError:  # nothing is known to be wrong
        raise
    except ValueError:
        journal.discard()
        raise


@contextmanager
def _told(directory: Path) -> Iterator[None]:
    """Errors of the file system, with what they mean for the conversion."""
    try:
        yield
    except OSError as error:
        raise OSError(
            error.errno,
            f"--save-dir {directory}: {error.strerror or error}. Nothing has that name yet; what "
            f"was written is kept beside it in .{directory.name}.converting: free space or mend "
            "the disk and give the same command again to go on, or remove that folder",
        ) from error


def _check_space(target: Target, directory: Path, out: Path) -> None:
    """The disk must have room for what is not there yet."""
    present = sum(file.stat().st_blocks * 512 for file in out.rglob("*") if file.is_file())
    needed = target.num_bytes + _MARGIN_BYTES - present
    free = shutil.disk_usage(out).free
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"--save-dir {directory}: the checkpoint takes {target.num_bytes / 2**30:.2f} GiB "
            f"({present / 2**30:.2f} are written) and {free / 2**30:.2f} GiB are free; free space "
            "or choose another disk. Nothing was written",
        )


def _allocate(target: Target, out: Path) -> None:
    for file in target.files:
        path = out / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as handle:
            handle.truncate(file.num_bytes)


def _jobs(source: Source, target: Target, journal: Journal) -> list[_Job]:
    """What is left to write, tensors of one source near each other, so that it is read once."""
    order = {name: i for i, name in enumerate(source.shapes)}
    last = len(order)

    def position(job: _Job) -> tuple[int, int, int]:
        pieces = target.files[job.file].tensors[job.tensor].pieces
        first = order.get(pieces[0].hf_name, last) if pieces else last
        return first, job.file, job.tensor

    return sorted(
        (
            _Job(f, t)
            for f, file in enumerate(target.files)
            for t in range(len(file.tensors))
            if (f, t) not in journal.done
        ),
        key=position,
    )


def _run_jobs(
    source: Source, target: Target, journal: Journal, workers: int, advance: Callable[[int], None]
) -> None:
    queue: SimpleQueue[_Job] = SimpleQueue()
    for job in _jobs(source, target, journal):
        queue.put(job)
    stop = Event()
    with ThreadPoolExecutor(max_workers=workers) as pool:
        running = [
            pool.submit(_Worker(source, target, journal, advance).run, queue, stop)
            for _ in range(workers)
        ]
        wait(running, return_when=FIRST_EXCEPTION)
        stop.set()
    for future in running:
        future.result()


@dataclass
class _Worker:
    """One thread: tensors that are written but not yet on disk, and their files."""

    source: Source
    target: Target
    journal: Journal
    advance: Callable[[int], None]
    written: dict[tuple[int, int], int] = field(default_factory=dict)
    num_bytes: int = 0
    memory: Memory = field(default_factory=lambda: Memory())

    def run(self, queue: SimpleQueue[_Job], stop: Event) -> None:
        while not stop.is_set():
            try:
                job = queue.get_nowait()
            except Empty:
                break
            file = self.target.files[job.file]
            crc = _write_tensor(
                self.source, file, job.tensor, self.journal.out / file.path, self.memory
            )
            self.written[job.file, job.tensor] = crc
            self.num_bytes += _size(file.tensors[job.tensor])
            if self.num_bytes >= _SYNC_BYTES:
                self._sync()
        self._sync()

    def _sync(self) -> None:
        for number in sorted({file for file, _ in self.written}):
            _sync_data(self.journal.out / self.target.files[number].path)
        if self.written:
            self.journal.record(self.written)
            self.advance(self.num_bytes)
        self.written, self.num_bytes = {}, 0


def _size(tensor: OutputTensor) -> int:
    return torch.Size(tensor.shape).numel() * tensor.dtype.itemsize


class Memory:
    """One block of memory, used again and again: fresh pages cost as much as the copy into them."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def block(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """[size], with what was in it."""
        needed = torch.Size(size).numel() * dtype.itemsize
        if self._bytes.numel() < needed:
            self._bytes = torch.empty(needed, dtype=torch.uint8)
        return self._bytes[:needed].view(dtype).view(size)


def _write_tensor(source: Source, file: OutputFile, index: int, path: Path, memory: Memory) -> int:
    """Fill and write one tensor; its CRC-32."""
    tensor, position, crc = file.tensors[index], file.offsets[index], 0
    descriptor = os.open(path, os.O_WRONLY)
    try:
        for block in row_blocks(tensor.shape, tensor.dtype.itemsize):
            values = memory.block(block.size, tensor.dtype)
            tensor.fill(source, block, values)
            data = bytes_of(values)
            crc = zlib.crc32(data, crc)
            _write_at(descriptor, data, position)
            position += len(data)
    finally:
        os.close(descriptor)
    return crc


def _write_at(descriptor: int, data: memoryview | bytes, position: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, position)
        view, position = view[count:], position + count


def _sync_data(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)


def _finish(target: Target, journal: Journal) -> None:
    """Headers and small files, and everything on disk."""
    for number, file in enumerate(target.files):
        checksums: Sequence[int] = [journal.done[number, t] for t in range(len(file.tensors))]
        descriptor = os.open(journal.out / file.path, os.O_WRONLY)
        try:
            for position, data in file.frame(checksums):
                _write_at(descriptor, data, position)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    for path, data in target.small.items():
        place = journal.out / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
        _sync_data(place)
