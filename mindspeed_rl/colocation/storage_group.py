"""Offloads the memory of one owner from the device and restores it, as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from mindspeed_rl.colocation.host_pool import HostPool
from mindspeed_rl.colocation.packed import Packing, plan_packing
from mindspeed_rl.platforms.base import Platform
from mindspeed_rl.platforms.storages import as_bytes, num_bytes, storages_of, take_memory

Find = Callable[[], Iterable[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Leaving:
    """Storages that are about to be freed, and how they will come back."""

    storages: Sequence[torch.UntypedStorage]
    packing: Packing | None


class StorageGroup:
    """The tensors of one owner, which are released and restored together.

    Args:
        owner: Name of the owner in tables and of its host region.
        find: Returns the owner's tensors. It is called at every release, because optimizers create
            their state at their first step.
        platform: Platform of the device.
        pool: Host memory for the content; ``None`` drops the content, which is undefined after
            :meth:`restore` until the owner writes it.
        before_release: Called before a release; raises when the memory is in use.
        packs: Whether several storages are restored as one, so that later copies are a single copy.
            Only for tensors of which ``find`` returns every view that is in use.
        num_writes: Returns a count that grows whenever the owner writes its tensors. While it is
            unchanged the host copy is reused; ``None`` copies at every release.
    """

    def __init__(
        self,
        owner: str,
        find: Find,
        platform: Platform,
        pool: HostPool | None,
        before_release: Callable[[], None] = lambda: None,
        *,
        packs: bool = False,
        num_writes: Callable[[], int] | None = None,
    ) -> None:
        assert pool is not None or not packs
        self.owner = owner
        self._find = find
        self._platform = platform
        self._pool = pool
        self._before_release = before_release
        self._packs = packs
        self._num_writes = num_writes
        self._copied_at: int | None = None
        self._away: list[tuple[torch.UntypedStorage, int]] = []
        self._packing: Packing | None = None
        self._leaving: _Leaving | None = None

    @property
    def is_onloaded(self) -> bool:
        """Whether the memory is on the device; it is until its copies to the host are done."""
        return not self._away

    @property
    def away_bytes(self) -> int:
        """Bytes that :meth:`restore` allocates."""
        return sum(size for _, size in self._away)

    def num_bytes(self) -> int:
        """Return the bytes on the device now, with tensors that were created since the release."""
        return num_bytes(storages_of(self._find()))

    def start_release(self) -> None:
        """Queue the copies of content that is kept to the host. Local; may be called again.

        The memory stays, to be read alone, until :meth:`release` waits for the copies and frees it
        or :meth:`restore` keeps it.
        """
        if not self.is_onloaded or self._leaving is not None:
            return
        self._before_release()
        tensors = [t for t in self._find() if t.untyped_storage().nbytes()]
        storages: Sequence[torch.UntypedStorage] = storages_of(tensors)
        packing = None
        if self._packs and len(storages) > 1:
            packing = plan_packing(tensors)
            storages = packing.storages
        if self._pool is not None and not self._host_has_it:
            self._copy(storages, self._pool, to_host=True)
            self._copied_at = self._num_writes() if self._num_writes else None
        self._leaving = _Leaving(storages, packing)

    def release(self) -> None:
        """Copy content that is kept to the host and free the memory. Local; may be called again.

        Copies run on the platform's copy stream, and later work on the device waits for them. After
        an error :meth:`restore` brings everything back.
        """
        if self.is_onloaded:
            self.start_release()
            assert self._leaving is not None
            if self._pool is not None:
                self._platform.wait_for_copies()
            leaving, self._leaving = self._leaving, None
            self._packing = leaving.packing
            self._away = [(storage, storage.nbytes()) for storage in leaving.storages]
        for storage, _ in self._away:
            storage.resize_(0)
        for place in self._packing.places if self._packing else ():
            place.tensor.untyped_storage().resize_(0)

    @property
    def _host_has_it(self) -> bool:
        return self._num_writes is not None and self._copied_at == self._num_writes()

    def restore(self) -> None:
        """Allocate the memory and copy kept content back. Local; what has not left yet stays.

        Copies may still be running: call :meth:`Platform.wait_for_copies` before the first use.

        Raises:
            RuntimeError: The device is out of memory; the group is released as before.
        """
        if self.is_onloaded:
            if self._leaving is not None:
                self._platform.wait_for_copies()  # before anything is written again
                self._leaving = None
            return
        try:
            if self._packing is None:
                self._take_back([storage for storage, _ in self._away])
            else:
                self._unpack(self._packing)
        except BaseException:
            self._platform.synchronize()  # no copy may write into memory that is freed
            self.release()
            raise
        self._away, self._packing = [], None

    def _take_back(self, storages: Sequence[torch.UntypedStorage]) -> None:
        for storage, size in self._away:
            take_memory(storage, size)
        if self._pool is not None:
            self._copy(storages, self._pool, to_host=False)

    def _unpack(self, packing: Packing) -> None:
        """Restore all tensors into one storage, of which they become views."""
        assert self._pool is not None
        device = self._platform.device
        whole = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
        take_memory(whole, packing.num_bytes)
        self._copy([whole], self._pool, to_host=False)
        for place in packing.places:
            place.move_into(whole)

    def _copy(
        self, storages: Sequence[torch.UntypedStorage], pool: HostPool, *, to_host: bool
    ) -> None:
        region = pool.region(self.owner, num_bytes(storages))
        sizes = [storage.nbytes() for storage in storages]
        with self._platform.copies():
            for storage, host in zip(storages, torch.split(region, sizes), strict=True):
                device = as_bytes(storage)
                source, target = (device, host) if to_host else (host, device)
                target.copy_(source, non_blocking=True)
