"""Memory of vLLM-Ascend's sleep mode, by tag.

Its pool maps physical memory under addresses that stay, so captured graphs stay valid. It can only
sleep as a whole; the phases give the cache and the weights away one after the other, so each tag is
unmapped by itself here. The weights' tag is saved as a whole (level 1): beside parameters, which
the next update writes, the pool holds plain tensors that nothing would restore, such as expert ids
of a dispatcher or cached rotary tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from mindspeed_rl.platforms.base import Platform

_DEVICE_TO_HOST = 2


class PoolMemory:
    """The allocations of one tag.

    Args:
        camem: the module ``vllm_ascend.device_allocator.camem``.
        tag: ``"weights"`` or ``"kv_cache"``.
        wake: the worker's ``wake_up``, which maps and restores a tag.
        platform: for host buffers, which are kept, and for emptying caches.
        save: keep the contents on the host while the tag is away.
        zero: tensors to clear when it comes back.
        pool_in_use: told whether the pool is, before it is mapped and after it has left.
    """

    def __init__(
        self,
        camem: Any,
        tag: str,
        wake: Callable[..., None],
        platform: Platform,
        *,
        save: bool,
        zero: Iterable[torch.Tensor] = (),
        pool_in_use: Callable[[bool], None] = lambda in_use: None,
    ) -> None:
        self._camem, self._tag, self._wake = camem, tag, wake
        self._platform, self._save, self._zero = platform, save, list(zero)
        self._pool_in_use = pool_in_use
        self._buffers: dict[int, torch.Tensor] = {}
        self._away = False
        self.num_bytes = sum(data.handle[1] for _, data in self._allocations())
        if not self.num_bytes:
            raise RuntimeError(
                f"vLLM-Ascend's memory pool holds nothing under the tag {tag!r}: sleep mode is not "
                "in force"
            )

    def _allocations(self) -> list[tuple[int, Any]]:
        pool = self._camem.CaMemAllocator.get_instance()
        return [(ptr, data) for ptr, data in pool.pointer_to_data.items() if data.tag == self._tag]

    def free(self) -> None:
        """Unmap the tag, its contents saved before; no effect when it is away."""
        if self._away:
            return
        self._platform.synchronize()
        for ptr, data in self._allocations():
            if self._save:
                data.cpu_backup_tensor = self._saved(ptr, data.handle[1])
            self._camem.unmap_and_release(data.handle)
        self._away = True
        self._platform.release_cached_memory()
        self._pool_in_use(False)

    def _saved(self, ptr: int, size: int) -> torch.Tensor:
        """A copy on the host, in a buffer that is pinned once."""
        buffer = self._buffers.get(ptr)
        if buffer is None or buffer.numel() != size:
            buffer = self._buffers[ptr] = self._platform.host_buffer(size)
        self._camem.memcpy(buffer.data_ptr(), size, ptr, size, _DEVICE_TO_HOST)
        return buffer

    def bring_back(self) -> None:
        """Map the tag at its addresses and restore what was saved."""
        if not self._away:
            return
        self._pool_in_use(True)
        self._wake(tags=[self._tag])
        self._away = False
        for tensor in self._zero:
            tensor.zero_()
