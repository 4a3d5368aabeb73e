"""Temporary folders that are removed after every way in which their owner may end.

A folder carries a lock file that the kernel keeps locked (``fcntl.lockf``) while the owner lives.
Whoever finds it unlocked may remove the folder: a process that survives its neighbour, or the next
start. It is locked before it gets its name, so that nobody finds it unlocked in between.

Segments of shared memory, which cannot lie in a folder, carry the key of one in their names
(:func:`segment_name`): they are removed with it where its owner is gone.
"""

from __future__ import annotations

import atexit
import fcntl
import glob
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

OWNER_FILE = ".owner"
PREFIX = "mindspeed_rl-"
SHARED_MEMORY = "/dev/shm"
LAUNCHER_PREFIX = "torchelastic_"  # of torchrun, which removes its folders only at a good end
_HIDDEN = f".{PREFIX}new-"
# No start of a process takes as long, so nobody who lives still needs what has no owner by then.
_OLD_S = 3600.0
_MINE: dict[Path, int] = {}  # descriptors of the locks of this process


@contextmanager
def owned_folder(name: str, root: str | None = None, key: str = "") -> Iterator[str]:
    """Make a private temporary folder for the time of the block.

    Args:
        name: Part of the folder's name that says what it is for.
        root: Folder that it is made in, of those that :func:`sweep` looks at; by default that of
            temporary files.
        key: Last part of the folder's name, of :func:`new_key`; a new one by default.
    """
    hidden = Path(tempfile.mkdtemp(prefix=_HIDDEN, dir=root))
    folder = hidden.with_name(f"{PREFIX}{name}-{key or new_key()}")
    descriptor = _locked_file(hidden)
    hidden.rename(folder)
    _MINE[folder], owner = descriptor, os.getpid()
    try:
        yield str(folder)
    finally:
        if os.getpid() == owner:  # not in a process that was forked off
            _remove(folder)


def kept_folder(name: str, root: str | None = None, key: str = "") -> str:
    """Make a folder as :func:`owned_folder` does, for the life of this process, and return it."""
    context = owned_folder(name, root, key)
    folder = context.__enter__()
    atexit.register(context.__exit__, None, None, None)
    return folder


def new_key() -> str:
    """Draw a key that nobody can guess, for a folder and the segments that belong to it."""
    return secrets.token_hex(8)


def segment_name(key: str, name: str) -> str:
    """Name a segment of shared memory that belongs to the folder with a key."""
    return f"{PREFIX}{key}-{name}"


def segments_of(key: str) -> list[Path]:
    """Return the segments of shared memory that belong to the folder with a key. Local.

    What others put there under its key is left out.
    """
    found = sorted(Path(SHARED_MEMORY).glob(f"*{PREFIX}{glob.escape(key)}-*"))
    return [path for path in found if _is_own_file(path)]


def _is_own_file(path: Path) -> bool:
    try:
        found = path.lstat()
    except FileNotFoundError:  # another process has removed it
        return False
    return found.st_uid == os.getuid() and stat.S_ISREG(found.st_mode)


def claim(folder: Path) -> None:
    """Mark a folder that another program made for this process, so that `sweep` may remove it.

    It stays marked until this process ends.
    """
    if folder not in _MINE:
        _MINE[folder] = _locked_file(folder)


def remove_mine() -> None:
    """Remove the folders of this process that it made itself, before it ends without clean-up."""
    for folder in [f for f in _MINE if f.name.startswith(PREFIX)]:
        _remove(folder)


def sweep(prefixes: Iterable[str] = (PREFIX,)) -> list[Path]:
    """Remove the folders of this user whose owners are gone, and return their paths.

    Segments of shared memory go with their folders, before them. Folders of living processes stay,
    whichever job they belong to; so do folders without a mark. What processes left that were killed
    before they had marked anything goes when it is an hour old.
    """
    roots = sorted({Path(tempfile.gettempdir()), Path(SHARED_MEMORY)})
    places = [(root, prefix) for root in roots for prefix in prefixes]
    found = [path for root, prefix in places for path in sorted(root.glob(f"{prefix}*"))]
    removed = [path for path in found if path not in _MINE and _removed_if_orphan(path)]
    hidden = [path for root in roots for path in sorted(root.glob(f"{_HIDDEN}*"))]
    return removed + [path for path in [*hidden, *_without_folder()] if _removed_if_old(path)]


def _without_folder() -> list[Path]:
    """Return the segments of shared memory that belong to no folder."""
    root = Path(SHARED_MEMORY)
    keys = [folder.name.rpartition("-")[2] for folder in root.glob(f"{PREFIX}*") if folder.is_dir()]
    owned = {path for key in keys for path in segments_of(key)}
    return [path for path in sorted(root.glob(f"*{PREFIX}*")) if path not in owned]


def _removed_if_old(path: Path) -> bool:
    try:
        found = path.lstat()
        if found.st_uid != os.getuid() or time.time() - found.st_mtime <= _OLD_S:
            return False
        if stat.S_ISREG(found.st_mode):
            path.unlink()
        elif path.name.startswith(_HIDDEN):
            shutil.rmtree(path, ignore_errors=True)
    except FileNotFoundError:  # another process has removed it
        return False
    return not path.exists()


def _locked_file(folder: Path) -> int:
    """Make the lock file of a folder; it is locked before it has its name."""
    hidden = folder / f"{OWNER_FILE}-{secrets.token_hex(8)}"
    descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    hidden.rename(folder / OWNER_FILE)
    return descriptor


def _removed_if_orphan(folder: Path) -> bool:
    try:
        found = folder.lstat()
        # Anybody may put a link there, to a folder of this user and under the key of a living run.
        if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
            return False
        descriptor = os.open(folder / OWNER_FILE, os.O_RDWR)
    except OSError:  # it is gone, or was made by an unmarked program
        return False
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # its owner lives
        return False
    else:
        for segment in segments_of(folder.name.rpartition("-")[2]):
            segment.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    descriptor = _MINE.pop(folder, None)
    if descriptor is None:
        return
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        os.close(descriptor)
