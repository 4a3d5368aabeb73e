"""Frees physical pages of host memory under addresses that stay, and asks for large pages."""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache

# Size of a large page on x86-64, and on arm64 with pages of 4 KiB.
_LARGE_PAGE_BYTES = 2 << 20


def discard_pages(address: int, num_bytes: int) -> bool:
    """Return the whole pages of a range to the system; they then read as zeros. Local.

    Source: madvise(2), MADV_DONTNEED on private anonymous memory, which is what allocators hand
    out. Bytes on the first and last page of the range, if it shares them, are not changed.

    Returns:
        Whether this system can do it (Linux); if not, nothing happened.

    Raises:
        OSError: The system refused.
    """
    if sys.platform != "linux":
        return False
    first, size = _whole_pages(address, num_bytes)
    if size > 0 and (number := _advise(first, size, mmap.MADV_DONTNEED)):
        raise OSError(number, f"madvise of {size} bytes")
    return True


def advise_large_pages(address: int, num_bytes: int) -> None:
    """Ask the system to back the whole pages of a range by large pages. Local.

    Otherwise writing to new memory is bound by page faults, which are 512 times as many. This is
    a hint alone, without effect where the system has no such pages.
    """
    if sys.platform != "linux" or num_bytes < _LARGE_PAGE_BYTES:
        return
    first, size = _whole_pages(address, num_bytes)
    _advise(first, size, mmap.MADV_HUGEPAGE)


def give_back_free_pages() -> None:
    """Make the C library return free memory to the system; only GNU's can."""
    trim = getattr(_libc(), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _whole_pages(address: int, num_bytes: int) -> tuple[int, int]:
    """Return address and size of the pages that lie wholly within a range."""
    page = mmap.PAGESIZE
    first = -(-address // page) * page
    return first, (address + num_bytes) // page * page - first


def _advise(first: int, size: int, advice: int) -> int:
    """Call madvise(2); return 0 or the number of the error."""
    refused = _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), ctypes.c_int(advice))
    return ctypes.get_errno() if refused else 0


@cache
def _libc() -> ctypes.CDLL:
    """Open the C library, once because every handle leaves a cycle for the garbage collector."""
    return ctypes.CDLL(None, use_errno=True)
