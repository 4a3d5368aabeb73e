"""How the flat messages of a round travel.

A message is one contiguous 1-d tensor per peer. Transports count what they put on the wire.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.distributed as dist


class Transport(Protocol):
    """Moves one round of messages."""

    sent_bytes: int

    def exchange(
        self,
        sends: Mapping[int, torch.Tensor],
        receive_sizes: Mapping[int, int],
        dtype: torch.dtype,
    ) -> dict[int, torch.Tensor]:
        """Send flat tensors to peers and receive flat tensors from peers.

        Args:
            sends: peer -> [elements].
            receive_sizes: peer -> number of elements that it sends to this rank.
            dtype: of all messages; equal on all ranks.

        Returns:
            peer -> [elements].
        """
        ...

    def all_gather(self, message: bytes) -> list[bytes]:
        """Every rank's message, by rank; all have the same length. Collective."""
        ...


class AllToAllTransport:
    """One all-to-all-v per round over a process group that holds all ranks. Collective."""

    def __init__(self, world: int, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self._world = world
        self._device = device
        self._group = group
        self.sent_bytes = 0

    def exchange(
        self,
        sends: Mapping[int, torch.Tensor],
        receive_sizes: Mapping[int, int],
        dtype: torch.dtype,
    ) -> dict[int, torch.Tensor]:
        """Send and receive in rank order. Collective."""
        in_sizes = [sends[p].numel() if p in sends else 0 for p in range(self._world)]
        out_sizes = [receive_sizes.get(p, 0) for p in range(self._world)]
        outgoing = torch.empty(sum(in_sizes), dtype=dtype, device=self._device)
        incoming = torch.empty(sum(out_sizes), dtype=dtype, device=self._device)
        start = 0
        for peer in sorted(sends):
            outgoing[start : start + sends[peer].numel()] = sends[peer]
            start += sends[peer].numel()
        dist.all_to_all_single(incoming, outgoing, out_sizes, in_sizes, group=self._group)
        self.sent_bytes += outgoing.numel() * outgoing.element_size()
        parts = torch.split(incoming, out_sizes)
        return {peer: parts[peer] for peer in receive_sizes}

    def all_gather(self, message: bytes) -> list[bytes]:
        """Every rank's message in rank order. Collective."""
        mine = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(self._device)
        everyone = [torch.empty_like(mine) for _ in range(self._world)]
        dist.all_gather(everyone, mine, group=self._group)
        return [bytes(other.tolist()) for other in everyone]
