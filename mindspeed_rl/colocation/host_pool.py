"""Host memory for offloaded tensors, allocated once and pinned where the device supports it."""

from __future__ import annotations

import torch

from mindspeed_rl.platforms.base import Platform


class HostPool:
    """Host regions, one per owner, that grow with their owner and are never freed.

    Args:
        platform: Platform that allocates and pins the memory.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._regions: dict[str, torch.Tensor] = {}

    def region(self, owner: str, num_bytes: int) -> torch.Tensor:
        """Return [num_bytes] uint8, the same memory at every call unless the owner grew. Local."""
        region = self._regions.get(owner)
        if region is None or region.numel() < num_bytes:
            self._regions.pop(owner, None)  # frees the old region before the new one is allocated
            region = self._platform.host_buffer(num_bytes)
            self._regions[owner] = region
        return region[:num_bytes]
