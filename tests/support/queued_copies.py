"""A platform whose copies are late, as those of a device are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_rl.platforms.cpu import CpuPlatform

GARBAGE = 0xAB
_COPY = torch.ops.aten.copy_.default


class _Queue(TorchDispatchMode):
    """Keeps copies for later; until then their targets hold garbage."""

    def __init__(self, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self._copies = copies

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not _COPY:
            return func(*args, **(kwargs or {}))
        target, source = args[:2]
        target.view(torch.uint8).fill_(GARBAGE)
        self._copies.append((target, source))
        return target


class QueuedCopies(CpuPlatform):
    """Copies happen when something waits for them: too late for memory that was given back."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def num_queued(self) -> int:
        """Copies that are not done yet."""
        return len(self._copies)

    @contextmanager
    def copies(self) -> Iterator[None]:
        """Copies within are queued."""
        with _Queue(self._copies):
            yield

    def wait_for_copies(self) -> None:
        """Do them in order.

        Raises:
            AssertionError: memory of one of them is gone.
        """
        for target, source in self._copies:
            sizes = (target.untyped_storage().nbytes(), source.untyped_storage().nbytes())
            assert all(sizes), "memory was given back before its copy was done"
            target.copy_(source)
        self._copies.clear()

    def synchronize(self) -> None:
        """As :meth:`wait_for_copies`."""
        self.wait_for_copies()
