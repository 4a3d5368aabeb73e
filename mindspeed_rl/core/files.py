"""Atomic writes: a file is written under a temporary name in its folder and then renamed."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_path(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path in the folder of ``target`` that replaces it when the block succeeds.

    A reader sees the old file or the new one, never a part of either. When the block raises, the
    temporary file is removed and the old file stays. The temporary name keeps the suffix, because
    libraries such as matplotlib choose the format by it. Missing parent folders are made.

    Raises:
        FileNotFoundError: The block succeeded without writing the file.
    """
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.stem}.tmp-{os.getpid()}{target.suffix}")
    try:
        yield temporary
        sync_path(temporary)
        os.replace(temporary, target)
        sync_path(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text_atomic(target: str | os.PathLike[str], text: str) -> None:
    """Replace the content of ``target`` by ``text`` (UTF-8) in one step."""
    with atomic_path(target) as temporary:
        temporary.write_text(text, encoding="utf-8")


def why_unreadable(path: Path, error: OSError) -> str:
    """Return why a file cannot be read; of a refused permission whose it is and what its mode is.

    Args:
        path: Path that was opened.
        error: What opening it raised.
    """
    if not isinstance(error, PermissionError):
        return error.strerror or str(error)
    for place in (*reversed(path.absolute().parents), path.absolute()):
        info = place.stat()  # the folders above it let this process pass
        is_folder = stat.S_ISDIR(info.st_mode)
        if not os.access(place, os.X_OK if is_folder else os.R_OK, effective_ids=True):
            return (
                f"permission denied: {place} belongs to {_user(info.st_uid)} with the mode "
                f"{stat.filemode(info.st_mode)}, and this process runs as {_user(os.geteuid())}"
            )
    return str(error)


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:  # containers often have no name for a user
        return f"user {number}"


def sync_path(path: Path) -> None:
    """Flush a file or folder to disk: a name that survives a power cut must not lack its data."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
