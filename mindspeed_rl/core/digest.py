"""Digests of files, which tell whether their bytes are the ones of before."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any


def file_digest(path: Path) -> str:
    """Return the 128-bit XXH3 digest of a file's bytes, in hex. Local.

    XXH3 costs a fifth of SHA-256 at most, which hardware may not have, and is faster than a disk;
    nobody is expected to forge a file that has the same digest.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, running_digest).hexdigest()


def text_digest(text: str) -> str:
    """Return the digest of a file that has this text in UTF-8."""
    state = running_digest()
    state.update(text.encode("utf-8"))
    digest: str = state.hexdigest()
    return digest


def running_digest() -> Any:
    """Return a new digest with ``update`` and ``hexdigest``; updates do not hold Python's lock."""
    import xxhash  # comes with `datasets`

    return xxhash.xxh3_128()
