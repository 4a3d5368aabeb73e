"""What the rest of the code asks of a device: only what is called."""

from __future__ import annotations

from typing import Protocol

import torch


class Platform(Protocol):
    """A kind of device.

    Attributes:
        name: ``"cpu"``, ``"cuda"`` or ``"npu"``.
        backend: argument of ``torch.distributed.init_process_group``.
        device: where this process computes.
    """

    name: str
    backend: str
    device: torch.device

    def set_device(self) -> None:
        """Bind this process to its device (by ``LOCAL_RANK``)."""
        ...

    def synchronize(self) -> None:
        """Wait for all queued work."""
        ...

    def rng_state(self) -> torch.Tensor | None:
        """State of the device generator; ``None`` when it is torch's own."""
        ...

    def set_rng_state(self, state: torch.Tensor | None) -> None:
        """Restore what :meth:`rng_state` gave."""
        ...

    def install(self) -> None:
        """Make megatron-core usable on this device; idempotent."""
        ...
