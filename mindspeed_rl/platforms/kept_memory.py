"""Memory whose contents are kept on the host while it is freed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from mindspeed_rl.platforms.base import Platform
from mindspeed_rl.platforms.storages import as_bytes, storages_of


class FreedAndBack(Protocol):
    """Memory that is freed as a whole and comes back."""

    @property
    def num_bytes(self) -> int: ...

    def free(self) -> None: ...

    def bring_back(self) -> None: ...


class KeptMemory:
    """Memory that comes back with the contents that its tensors had when it was freed.

    Args:
        memory: Memory that is freed, and comes back with any contents. Its storages stay.
        tensors: Tensors in it, whose storages are kept as a whole.
        platform: Provides host buffers, which are allocated once.
    """

    def __init__(
        self, memory: FreedAndBack, tensors: Iterable[torch.Tensor], platform: Platform
    ) -> None:
        self._memory, self._platform = memory, platform
        self._storages = storages_of(tensors)
        self._copies: list[torch.Tensor] = []
        self._is_away = False

    @property
    def num_bytes(self) -> int:
        """Bytes that are freed."""
        return self._memory.num_bytes

    def free(self) -> None:
        """Copy the tensors to the host and free the memory; no effect when it is free.

        Raises:
            RuntimeError: The memory could not be freed; the tensors are as they were.
        """
        if self._is_away:
            return
        if not self._copies:
            self._copies = [self._platform.host_buffer(s.nbytes()) for s in self._storages]
        self._platform.synchronize()
        for copy, storage in zip(self._copies, self._storages, strict=True):
            copy.copy_(as_bytes(storage))
        try:
            self._memory.free()
        except BaseException:
            self._fill()
            raise
        self._is_away = True

    def bring_back(self) -> None:
        """Bring memory and contents back; no effect when it is not free.

        Raises:
            RuntimeError: The device has not enough memory; the contents stay on the host.
        """
        if not self._is_away:
            return
        self._memory.bring_back()
        self._fill()
        self._is_away = False

    def _fill(self) -> None:
        for copy, storage in zip(self._copies, self._storages, strict=True):
            as_bytes(storage).copy_(copy)
        self._platform.synchronize()
