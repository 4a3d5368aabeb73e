"""Host memory for the copy of a checkpoint that is written while the run goes on. Local."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

_ALIGNMENT = 64


class Host(Protocol):
    """What is needed of a platform."""

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Allocate [num_bytes] uint8 on the host, pinned where that makes copies asynchronous."""

    def synchronize(self) -> None:
        """Wait for all queued work of the device."""


class StagingMemory:
    """Regions of host memory, kept from one checkpoint to the next and grown when needed."""

    def __init__(self) -> None:
        self._regions: dict[str, torch.Tensor] = {}

    def copies(self, host: Host, owner: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return contiguous copies of tensors, which hold until the next call for this owner.

        Copies of tensors of a device are queued; who reads them waits for the device first.
        """
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        region = self._regions.get(owner)
        if region is None or region.numel() < end:
            self._regions.pop(owner, None)
            del region  # the old memory is freed before the new one is allocated
            region = self._regions[owner] = host.host_buffer(end)
        memory = region.numpy()
        found = []
        for tensor, start in zip(tensors, starts, strict=True):
            # Each has a storage of its own size: an archive of torch holds the whole storage.
            own = torch.from_numpy(memory[start : start + tensor.nbytes])
            copy = own.view(tensor.dtype).view(tensor.shape)
            found.append(copy.copy_(tensor, non_blocking=True))
        return found
