"""Allocates pinned host memory of an exact size from CANN.

torch_npu's pinned tensors come from PyTorch's caching allocator, which rounds sizes up to powers of
two: 33 GiB take 64. Its copies ask CANN, and
not its own allocator, whether the memory is pinned (``process_non_blocking_copy`` in
``torch_npu/csrc/core/npu/CachingHostAllocator.cpp``), so they are asynchronous with this memory,
too. What torch_npu's allocator does besides is up to the owner: memory that is freed may still be
read or written by a copy, and is therefore freed after all work of the device.

Memory of the C library that is registered (``aclrtHostRegisterV2``) is no way: drivers before
25.5.0 lack it, and its pages would move from under the device when a fork copies them on write.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch


def pinned_buffer(num_bytes: int, synchronize: Callable[[], None]) -> torch.Tensor:
    """Allocate [num_bytes] uint8 of pinned memory, which is freed with its last view. Local.

    Args:
        num_bytes: Size; 0 is ordinary memory.
        synchronize: Waits for all work of the device, before the memory is freed.

    Raises:
        RuntimeError: CANN refused.
    """
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    address = ctypes.c_void_p()
    status = _runtime().aclrtMallocHost(ctypes.byref(address), ctypes.c_size_t(num_bytes))
    if status or address.value is None:
        raise RuntimeError(
            f"aclrtMallocHost of {num_bytes} bytes of pinned host memory failed with status "
            f"{status}; free host memory, or offload less (--rl-offload)"
        )
    block = (ctypes.c_uint8 * num_bytes).from_address(address.value)
    # The tensor's storage refers to the block, so views of the tensor keep it alive as well.
    freed = weakref.finalize(block, _free, address.value, synchronize)
    freed.atexit = False  # CANN may have ended by then, and the system frees it anyway
    return torch.frombuffer(block, dtype=torch.uint8)


def _free(address: int, synchronize: Callable[[], None]) -> None:
    synchronize()
    if status := _runtime().aclrtFreeHost(ctypes.c_void_p(address)):
        raise RuntimeError(f"aclrtFreeHost failed with status {status}")


@cache
def _runtime() -> Any:
    """Open CANN's runtime, which torch_npu has loaded."""
    return ctypes.CDLL("libascendcl.so")
