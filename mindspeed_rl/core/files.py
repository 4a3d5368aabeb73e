"""Atomic writes: a file is written under a temporary name in its folder and then renamed."""

from __future__ import annotations

import os
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


def sync_path(path: Path) -> None:
    """Flush a file or folder to disk: a name that survives a power cut must not lack its data."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
