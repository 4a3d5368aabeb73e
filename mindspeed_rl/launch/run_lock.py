"""Keeps two runs from writing into one folder: a lock file with host, process and start time.

The kernel holds the lock (of ``fcntl.lockf``, also over NFS) as long as the process lives, so that
the lock of a run that was killed is free at once. What the file says is for people, and tells the
next start whose results it finds.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from mindspeed_rl.core.errors import UsageError

LOCK_FILE = ".run.lock"
LEASE_S = 120.0  # a file server frees the locks of a machine that is gone a while later (NFS: 90 s)
# Descriptors of the locks of this process, and what their files said before.
_HELD: dict[Path, tuple[int, bytes]] = {}
_TAKEN = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class Note:
    """Who holds a lock, or held it when it ended.

    Attributes:
        host: Name of the machine.
        pid: Process of rank 0 there.
        started: Time of the start in UTC.
        output_dir: Folder of the results of its run, absolute.
    """

    host: str
    pid: int
    started: str
    output_dir: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, started {self.started}"


def read_note(folder: Path) -> Note | None:
    """Return what the lock file of a folder says; ``None`` where no run left one, or it ended well.

    Not for a folder that this process has locked: closing the file would unlock it.
    """
    try:
        return _parsed((folder / LOCK_FILE).read_bytes())
    except OSError:
        return None


def _parsed(text: bytes) -> Note | None:
    try:
        note = Note(**json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return None
    texts = (note.host, note.started, note.output_dir)
    return note if type(note.pid) is int and all(isinstance(t, str) for t in texts) else None


def lock_folders(folders: Mapping[str, str], output_dir: str, wait_s: float = 0.0) -> list[str]:
    """Lock folders for this process until `release`, or its end.

    Args:
        folders: The folders by their flag; those that are missing are made.
        output_dir: Folder of the run's results, for the note.
        wait_s: How long to wait for a lock that another process has.

    Returns:
        Lines about locks that were left by runs that are gone, and about file systems without.

    Raises:
        UsageError: A living run has one of the folders, or one cannot be made; the message names
            it.
    """
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    me = Note(socket.gethostname(), os.getpid(), now, str(Path(output_dir).resolve()))
    lines, end = [], time.monotonic() + wait_s
    for flag, path in folders.items():
        folder = Path(path).resolve()
        if folder not in _HELD:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                why = f"the folder cannot be made ({error.strerror}); choose another place"
                raise UsageError(f"{flag} {path}: {why}") from None
            lines += _lock(flag, folder, me, end)
    return lines


def refuse_living_run(flag: str, path: str) -> None:
    """Refuse a folder that a living run has locked. Local; the lock is not kept.

    Raises:
        UsageError: The message names the run.
    """
    folder = Path(path).resolve()
    if folder in _HELD or not (folder / LOCK_FILE).is_file():
        return
    descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            raise UsageError(
                f"{flag} {path} is of a run that still goes on ({read_note(folder)}): the two "
                "would go separate ways from a checkpoint that may be removed; end that run, or "
                "copy the checkpoint that you want and name the copy's folder"
            ) from None
    finally:
        os.close(descriptor)


def release(*, refused: bool = False) -> None:
    """Give all locks back after a good end; their files then name nobody.

    A start that was ``refused`` before its first step leaves the files as it found them.
    """
    while _HELD:
        _, (descriptor, before) = _HELD.popitem()
        with suppress(OSError):  # the disk is full or gone, and the end of the process unlocks
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, before if refused else b"", 0)
        os.close(descriptor)


def _take(descriptor: int, end: float) -> None:
    """Lock a file; while another process has it, try again until ``end``."""
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _TAKEN or time.monotonic() >= end:
                raise
            time.sleep(0.5)
        else:
            return


def _lock(flag: str, folder: Path, me: Note, end: float) -> list[str]:
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _take(descriptor, end)
    except OSError as error:
        os.close(descriptor)
        if error.errno in _TAKEN:
            raise UsageError(
                f"{flag} {folder} is in use by another run ({read_note(folder)}), and two would "
                "mix their results; end that run, or choose another folder. "
                "--overwrite-output-dir does not allow it"
            ) from None
        if error.errno not in _NO_LOCKS:
            raise
        return [f"{flag} {folder}: its file system has no locks, so a second run is not noticed"]
    text = os.pread(descriptor, 4096, 0)  # closing another descriptor would unlock
    before = _parsed(text)
    _HELD[folder] = descriptor, text
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, (json.dumps(asdict(me)) + "\n").encode(), 0)
    if before is None:
        return []
    return [f"{flag} {folder}: took over the lock of a run that is gone ({before})"]
