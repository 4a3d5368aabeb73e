"""Frees and restores the memory of an engine's sleep mode, one tag at a time.

Its pool (``cumem`` in vLLM on CUDA, ``camem`` in vLLM-Ascend) maps physical memory under addresses
that stay, so captured graphs stay valid. By itself the pool sleeps as a whole, and copies
all weights to the host although the next update writes them; but the phases free cache and weights
one after the other. So this module unmaps and maps each tag by itself, and of the weights saves
only what no update writes: plain tensors in the pool, such as expert ids of a dispatcher or cached
rotary tables. Memory that the pool keeps for later tensors is not saved either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mindspeed_rl.platforms.base import Platform
from mindspeed_rl.platforms.storages import outside, span_of

_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2
# No engine knows a tag with this suffix, so none maps an allocation that has it.
_MAPPED_BY_US = " mapped by mindspeed_rl"


class PoolMemory:
    """The allocations of the pool under one tag.

    The object records which allocations are mapped and filled. A call that raises undoes what it
    did; where that fails as well, the next call continues from the recorded state.

    Args:
        camem: The module ``vllm_ascend.device_allocator.camem``, or what has its names.
        tag: Tag of the allocations, ``"weights"`` or ``"kv_cache"``.
        wake: The worker's ``wake_up``, which does more than mapping.
        platform: Provides host buffers, which are kept, and empties caches.
        save: Whether to keep the contents on the host while unmapped, except those of ``lost``.
        lost: Returns tensors that come back as zeros: the next update writes them, or they are
            empty.
        unused: Returns addresses of memory that no tensor has.
        pool_in_use: Called with true before the pool is mapped, with false after it is unmapped.
    """

    def __init__(
        self,
        camem: Any,
        tag: str,
        wake: Callable[..., None],
        platform: Platform,
        *,
        save: bool,
        lost: Callable[[], Iterable[torch.Tensor]],
        unused: Callable[[], Iterable[range]] = lambda: (),
        pool_in_use: Callable[[bool], None] = lambda in_use: None,
    ) -> None:
        self._camem, self._tag, self._wake = camem, tag, wake
        self._platform, self._save, self._lost = platform, save, lost
        self._unused, self._pool_in_use = unused, pool_in_use
        self._buffers: dict[int, torch.Tensor] = {}
        self._spans: dict[int, list[range]] = {}
        self._cleared: list[torch.Tensor] = []
        # Allocations that are not mapped, and those whose contents are on the host alone. A dict
        # instead of a set lets one statement both change a mapping and record it.
        self._away: dict[int, None] = {}
        self._unfilled: set[int] = set()
        self.num_bytes = sum(data.handle[1] for data in self._allocations().values())
        if not self.num_bytes:
            raise RuntimeError(
                f"the engine's memory pool holds nothing under the tag {tag!r}: sleep mode is not "
                "in force"
            )

    def _allocations(self) -> dict[int, Any]:
        pool = self._camem.CaMemAllocator.get_instance()
        tags = (self._tag, self._tag + _MAPPED_BY_US)
        return {ptr: data for ptr, data in pool.pointer_to_data.items() if data.tag in tags}

    def free(self) -> None:
        """Save what is to be kept and unmap the tag; no effect when it is unmapped.

        Raises:
            RuntimeError: An allocation could not be saved or unmapped. All of them are mapped
                again; tensors of ``lost`` may be zero.
        """
        here = {p: data for p, data in self._allocations().items() if p not in self._away}
        if not here:
            return
        self._platform.synchronize()
        cleared = list(self._lost())
        if self._save:
            lost = [span for tensor in cleared if (span := span_of(tensor))]
            lost += self._unused()
            for ptr, data in here.items():
                self._keep(ptr, outside(range(ptr, ptr + data.handle[1]), lost))
        self._cleared = cleared
        try:
            self._unmap(here)
            self._platform.release_cached_memory()
            self._pool_in_use(False)
        except BaseException:
            self._map()
            raise

    def bring_back(self) -> None:
        """Map the tag at its old addresses, with saved contents restored and the rest zero.

        Nothing of it stays mapped when that fails.

        Raises:
            RuntimeError: The device has not enough free memory; the pool's own code would end the
                process.
        """
        if not self._away and not self._unfilled:
            return
        self._check_room()
        back = {p: data for p, data in self._allocations().items() if p in self._away}
        try:
            self._pool_in_use(True)
            self._map()
            with self._hidden():
                self._wake(tags=[self._tag])
        except BaseException:
            self._platform.synchronize()
            self._unmap(back)
            self._pool_in_use(False)
            raise

    def _check_room(self) -> None:
        known = self._allocations()
        needed = sum(known[ptr].handle[1] for ptr in self._away)
        if needed > self._platform.memory().free_bytes:
            self._platform.release_cached_memory()
        if needed > (free := self._platform.memory().free_bytes):
            raise RuntimeError(
                f"the engine's {self._tag} need {needed / 2**30:.2f} GiB, and the device has "
                f"{free / 2**30:.2f} GiB free; --rl-dry-run shows what takes memory in each phase"
            )

    def _unmap(self, allocations: dict[int, Any]) -> None:
        """Unmap those of the allocations that are mapped, and mark all of them as unfilled."""
        self._unfilled |= allocations.keys()
        for ptr, data in allocations.items():
            if ptr not in self._away:
                self._away[ptr] = self._camem.unmap_and_release(data.handle)

    def _map(self) -> None:
        """Map the unmapped allocations and restore the contents of the unfilled ones."""
        known = self._allocations()
        for ptr in list(self._away):
            self._away.pop(ptr, self._camem.create_and_map(known[ptr].handle))
        for ptr in list(self._unfilled):
            self._restore(ptr)
        for tensor in self._cleared:
            tensor.zero_()
        self._unfilled.clear()

    def _keep(self, ptr: int, spans: list[range]) -> None:
        """Copy parts of an allocation to the host, into a buffer that is allocated once."""
        size = sum(map(len, spans))
        buffer = self._buffers.get(ptr)
        if buffer is None or buffer.numel() != size:
            del buffer
            self._buffers.pop(ptr, None)  # freed before the next is allocated
            buffer = self._buffers[ptr] = self._platform.host_buffer(size)
        self._spans[ptr] = spans
        for at, span in _places(spans):
            self._copy(buffer.data_ptr() + at, span.start, len(span), _DEVICE_TO_HOST)

    def _restore(self, ptr: int) -> None:
        for at, span in _places(self._spans.get(ptr, [])):
            host = self._buffers[ptr].data_ptr() + at
            self._copy(span.start, host, len(span), _HOST_TO_DEVICE)

    def _copy(self, to: int, source: int, size: int, kind: int) -> None:
        status = self._camem.memcpy(to, size, source, size, kind)
        if status:
            way = "to the host" if kind == _DEVICE_TO_HOST else "to the device"
            raise RuntimeError(
                f"a copy of {size} bytes {way} failed with status {status} (memory of tag "
                f"{self._tag!r})"
            )

    @property
    def saved_bytes(self) -> int:
        """Bytes on the host, which stay allocated."""
        return sum(buffer.numel() for buffer in self._buffers.values())

    @contextmanager
    def _hidden(self) -> Iterator[None]:
        """Rename the tag of our allocations, so that the engine's own waking maps none of them."""
        mine = list(self._allocations().values())
        try:
            for data in mine:
                data.tag = self._tag + _MAPPED_BY_US
            yield
        finally:
            for data in mine:
                data.tag = self._tag


def _places(spans: Iterable[range]) -> Iterator[tuple[int, range]]:
    """Yield each span with its offset in a host buffer that holds them one after the other."""
    at = 0
    for span in spans:
        yield at, span
        at += len(span)
