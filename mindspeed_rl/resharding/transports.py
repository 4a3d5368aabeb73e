"""How the flat messages of a round travel.

A rank's messages of a round are one contiguous buffer, in the order of its peers; so is what it
receives. Transports count what they put on the wire.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

TRANSPORTS = ("all-to-all", "p2p")


class Pending(Protocol):
    """A round on its way."""

    def wait(self) -> None:
        """Return when what is received may be read and what was sent may be overwritten."""
        ...


class Transport(Protocol):
    """Moves the messages of rounds. ``device`` is where buffers must be.

    ``sent_bytes`` and ``received_bytes`` count since the beginning.
    """

    sent_bytes: int
    received_bytes: int
    device: torch.device

    def start(
        self,
        outgoing: torch.Tensor,
        send_sizes: Mapping[int, int],
        incoming: torch.Tensor,
        receive_sizes: Mapping[int, int],
    ) -> Pending:
        """Post one round; several may be on their way, in the same order on all ranks.

        Collective over the transport's ranks, including those that move nothing.

        Args:
            outgoing: [elements] messages by ascending peer.
            send_sizes: elements for each peer, ascending.
            incoming: [elements] to be filled; of the same element type as ``outgoing``.
            receive_sizes: elements from each peer, ascending.
        """
        ...

    def all_gather(self, message: bytes) -> list[bytes]:
        """Every rank's message, by rank; all have the same length. Collective."""
        ...


class _GroupTransport:
    """What transports over a process group share."""

    def __init__(self, world: int, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self._world = world
        self.device = device
        self._group = group
        self.sent_bytes = 0
        self.received_bytes = 0

    def _count(self, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
        self.sent_bytes += outgoing.numel() * outgoing.element_size()
        self.received_bytes += incoming.numel() * incoming.element_size()

    def all_gather(self, message: bytes) -> list[bytes]:
        """Every rank's message in rank order. Collective."""
        mine = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(self.device)
        everyone = [torch.empty_like(mine) for _ in range(self._world)]
        dist.all_gather(everyone, mine, group=self._group)
        return [bytes(other.tolist()) for other in everyone]


class AllToAllTransport(_GroupTransport):
    """One all-to-all-v per round over a process group that holds all ranks. Collective."""

    def start(
        self,
        outgoing: torch.Tensor,
        send_sizes: Mapping[int, int],
        incoming: torch.Tensor,
        receive_sizes: Mapping[int, int],
    ) -> Pending:
        """Post the collective."""
        self._count(outgoing, incoming)
        received, sent = (
            [sizes.get(p, 0) for p in range(self._world)] for sizes in (receive_sizes, send_sizes)
        )
        work: Pending = dist.all_to_all_single(
            incoming, outgoing, received, sent, group=self._group, async_op=True
        )
        return work


@dataclass(frozen=True, slots=True)
class _All:
    """Several operations on their way."""

    works: Sequence[Pending]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class PointToPointTransport(_GroupTransport):
    """Sends and receives between the ranks that have something for each other, and no others."""

    def start(
        self,
        outgoing: torch.Tensor,
        send_sizes: Mapping[int, int],
        incoming: torch.Tensor,
        receive_sizes: Mapping[int, int],
    ) -> Pending:
        """Post one send or receive per peer."""
        self._count(outgoing, incoming)
        operations = [
            dist.P2POp(kind, part, peer, self._group)
            for kind, buffer, sizes in (
                (dist.irecv, incoming, receive_sizes),
                (dist.isend, outgoing, send_sizes),
            )
            for peer, part in zip(sizes, torch.split(buffer, list(sizes.values())), strict=True)
        ]
        works: list[Any] = dist.batch_isend_irecv(operations) if operations else []
        return _All(works)


def make_transport(
    name: str, world: int, device: torch.device, group: dist.ProcessGroup | None = None
) -> Transport:
    """The transport of ``--reshard-transport``."""
    if name == "p2p":
        return PointToPointTransport(world, device, group)
    return AllToAllTransport(world, device, group)
