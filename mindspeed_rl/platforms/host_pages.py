"""Physical pages of host memory, given back while the addresses stay."""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache

# Of x86-64 and of arm64 with pages of 4 KiB.
_LARGE_PAGE_BYTES = 2 << 20


def discard_pages(address: int, num_bytes: int) -> bool:
    """Give the whole pages of a range back to the system; they read as zeros from now on. Local.

    Source: madvise(2), MADV_DONTNEED on private anonymous memory, which is what allocators hand
    out. Bytes of the range on its first and last page, which it may share, stay as they are.

    Returns:
        Whether this system can do it (Linux); nothing happened if not.

    Raises:
        OSError: the system refused.
    """
    if sys.platform != "linux":
        return False
    first, size = _whole_pages(address, num_bytes)
    if size > 0 and (number := _advise(first, size, mmap.MADV_DONTNEED)):
        raise OSError(number, f"madvise of {size} bytes")
    return True


def advise_large_pages(address: int, num_bytes: int) -> None:
    """Let the whole pages of a range come in large ones when they are touched. Local.

    Writing what has just been allocated is bound by page faults otherwise: 512 times as many. Only
    a hint: nothing happens where the system has no such pages.
    """
    if sys.platform != "linux" or num_bytes < _LARGE_PAGE_BYTES:
        return
    first, size = _whole_pages(address, num_bytes)
    _advise(first, size, mmap.MADV_HUGEPAGE)


def give_back_free_pages() -> None:
    """Make the C library return free memory to the system, where it can (that of GNU)."""
    trim = getattr(_libc(), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _whole_pages(address: int, num_bytes: int) -> tuple[int, int]:
    """Address and bytes of the pages that lie within a range as a whole."""
    page = mmap.PAGESIZE
    first = -(-address // page) * page
    return first, (address + num_bytes) // page * page - first


def _advise(first: int, size: int, advice: int) -> int:
    """madvise(2); 0 or the number of the error."""
    refused = _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), ctypes.c_int(advice))
    return ctypes.get_errno() if refused else 0


@cache
def _libc() -> ctypes.CDLL:
    """Opened once: every handle is a class of its own, in a cycle that waits for the collector."""
    return ctypes.CDLL(None, use_errno=True)
