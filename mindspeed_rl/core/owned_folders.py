"""Temporary folders that are removed after every way in which their owner may end.

A folder carries a lock file that the kernel keeps locked (``fcntl.lockf``) while the owner lives.
Whoever finds it unlocked may remove the folder: a process that survives its neighbour, or the next
start. It is locked before it gets its name, so that nobody finds it unlocked in between.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

OWNER_FILE = ".owner"
PREFIX = "mindspeed_rl-"
SHARED_MEMORY = "/dev/shm"
LAUNCHER_PREFIX = "torchelastic_"  # of torchrun, which removes its folders only at a good end
_MINE: dict[Path, int] = {}  # descriptors of the locks of this process


@contextmanager
def owned_folder(name: str, root: str | None = None) -> Iterator[str]:
    """Make a private temporary folder for the time of the block.

    Args:
        name: Part of the folder's name that says what it is for.
        root: Folder that it is made in, of those that :func:`sweep` looks at; by default that of
            temporary files.
    """
    hidden = Path(tempfile.mkdtemp(prefix=".new-", dir=root))
    folder = hidden.with_name(f"{PREFIX}{name}-{secrets.token_hex(8)}")
    descriptor = _locked_file(hidden)
    hidden.rename(folder)
    _MINE[folder] = descriptor
    try:
        yield str(folder)
    finally:
        _remove(folder)


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

    Folders of living processes stay, whichever job they belong to; so do folders without a mark.
    """
    roots = {Path(tempfile.gettempdir()), Path(SHARED_MEMORY)}
    places = [(root, prefix) for root in sorted(roots) for prefix in prefixes]
    found = [path for root, prefix in places for path in sorted(root.glob(f"{prefix}*"))]
    return [path for path in found if path not in _MINE and _removed_if_orphan(path)]


def _locked_file(folder: Path) -> int:
    """Make the lock file of a folder; it is locked before it has its name."""
    hidden = folder / f"{OWNER_FILE}-{secrets.token_hex(8)}"
    descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    hidden.rename(folder / OWNER_FILE)
    return descriptor


def _removed_if_orphan(folder: Path) -> bool:
    try:
        if folder.stat().st_uid != os.getuid():
            return False
        descriptor = os.open(folder / OWNER_FILE, os.O_RDWR)
    except OSError:  # it is gone, or was made by an unmarked program
        return False
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # its owner lives
        return False
    else:
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
