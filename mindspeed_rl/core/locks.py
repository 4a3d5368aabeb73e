"""Locks between the processes of a node."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_S = 0.1


@contextmanager
def file_lock(
    path: Path, limit_s: float, on_wait: Callable[[str], None]
) -> Iterator[Callable[[str], None]]:
    """Hold the lock of a file, which the system takes back when the process ends.

    Args:
        path: File of the lock; it is made where it is missing, and stays.
        limit_s: Longest wait without a new note of another holder, in seconds.
        on_wait: Called again and again while waiting, with the holder's latest note.

    Yields:
        A function that leaves a note, of up to 200 bytes, for those who wait.

    Raises:
        TimeoutError: another process held the lock and left no new note for ``limit_s``; the text
            is its last one.
        OSError: the file cannot be made, or its file system has no locks.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        end, last = 0.0, None
        while not _taken(file):
            note = os.pread(file, 200, 0).decode(errors="replace").strip()
            if note != last:
                end, last = time.monotonic() + limit_s, note
            if time.monotonic() > end:
                raise TimeoutError(note)
            on_wait(note)
            time.sleep(_POLL_S)
        yield lambda note: _write_note(file, note)
    finally:
        os.close(file)


def _taken(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_note(file: int, note: str) -> None:
    os.pwrite(file, note.encode()[:200].ljust(200), 0)
