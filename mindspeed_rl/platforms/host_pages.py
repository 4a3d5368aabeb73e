"""Physical pages of host memory, given back while the addresses stay."""

from __future__ import annotations

import ctypes
import mmap
import sys


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
    page = mmap.PAGESIZE
    first = -(-address // page) * page
    size = (address + num_bytes) // page * page - first
    if size <= 0:
        return True
    libc = ctypes.CDLL(None, use_errno=True)
    refused = libc.madvise(
        ctypes.c_void_p(first), ctypes.c_size_t(size), ctypes.c_int(mmap.MADV_DONTNEED)
    )
    if refused:
        raise OSError(ctypes.get_errno(), f"madvise of {size} bytes")
    return True
