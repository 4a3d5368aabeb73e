"""The memory of one owner, which leaves the device and comes back as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from mindspeed_rl.offload.host_pool import HostPool
from mindspeed_rl.offload.storages import as_bytes, num_bytes, storages_of
from mindspeed_rl.platforms.base import Platform

Find = Callable[[], Iterable[torch.Tensor]]


class StorageGroup:
    """Tensors of one owner.

    Args:
        owner: name in tables and of the host region.
        find: the owner's tensors. It is asked at every release, since optimizers make their state
            at their first step.
        platform: the device.
        pool: where the content waits; ``None``: it is dropped, and what comes back is undefined
            until its owner writes it.
        before_release: called first; raises when the memory is in use.
    """

    def __init__(
        self,
        owner: str,
        find: Find,
        platform: Platform,
        pool: HostPool | None,
        before_release: Callable[[], None] = lambda: None,
    ) -> None:
        self.owner = owner
        self._find = find
        self._platform = platform
        self._pool = pool
        self._before_release = before_release
        self._away: list[tuple[torch.UntypedStorage, int]] = []

    @property
    def resident(self) -> bool:
        """Whether the memory is on the device."""
        return not self._away

    def num_bytes(self) -> int:
        """Bytes on the device now; what came into being while the group was away is counted."""
        return num_bytes(storages_of(self._find()))

    def release(self) -> None:
        """Give the memory back to the allocator. Local; no effect when it is away already.

        Copies run on the platform's copy stream, and later work on the device waits for them.
        """
        if not self.resident:
            return
        self._before_release()
        storages = [s for s in storages_of(self._find()) if s.nbytes()]
        if self._pool is not None:
            self._copy(storages, self._pool, to_host=True)
        self._away = [(storage, storage.nbytes()) for storage in storages]
        for storage in storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Take the memory back, with its content if it is kept. Local; no effect when it is here.

        Copies may still be on their way: :meth:`Platform.wait_for_copies` before the first use.

        Raises:
            RuntimeError: the device is out of memory; the group is away as before.
        """
        storages = [storage for storage, _ in self._away]
        try:
            for storage, size in self._away:
                storage.resize_(size)
            if self._pool is not None:
                self._copy(storages, self._pool, to_host=False)
        except BaseException:
            self._platform.synchronize()  # no copy is on its way into what is given back
            for storage in storages:
                storage.resize_(0)
            raise
        self._away = []

    def _copy(self, storages: list[torch.UntypedStorage], pool: HostPool, *, to_host: bool) -> None:
        region = pool.region(self.owner, num_bytes(storages))
        sizes = [storage.nbytes() for storage in storages]
        with self._platform.copies():
            for storage, host in zip(storages, torch.split(region, sizes), strict=True):
                device = as_bytes(storage)
                source, target = (device, host) if to_host else (host, device)
                target.copy_(source, non_blocking=True)
        if to_host:
            self._platform.wait_for_copies()
