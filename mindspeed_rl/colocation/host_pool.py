"""Host memory for what waits there: pinned where the device has it, allocated once."""

from __future__ import annotations

import torch

from mindspeed_rl.platforms.base import Platform


class HostPool:
    """One region per owner. A region grows when its owner does and is never given back.

    Args:
        platform: pins the memory.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._regions: dict[str, torch.Tensor] = {}

    def region(self, owner: str, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8: the same memory at every call unless the owner grew. Local."""
        region = self._regions.get(owner)
        if region is None or region.numel() < num_bytes:
            self._regions.pop(owner, None)  # the old one leaves before the new one comes
            region = self._platform.host_buffer(num_bytes)
            self._regions[owner] = region
        return region[:num_bytes]

    @property
    def num_bytes(self) -> int:
        """Host memory of all regions."""
        return sum(region.numel() for region in self._regions.values())
