"""Transports, which move the flat messages of a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mindspeed_rl.parallel.small_collectives import gather_rows
from mindspeed_rl.parallel.two_levels import FROM_RANKS

# Flat messages by peer, each peer's in order.
Tensors = Mapping[int, Sequence[torch.Tensor]]


class Pending(Protocol):
    """The communication of a round that has started."""

    def wait(self) -> None:
        """Wait until received messages may be read and sent ones may be overwritten."""
        ...


class Transport(Protocol):
    """Moves the messages of rounds. ``device`` is where buffers must be.

    With ``many_messages`` a peer may be sent several messages, from and into any memory.
    """

    many_messages: bool
    device: torch.device

    def start(self, sends: Tensors, receives: Tensors, dtype: torch.dtype) -> Pending:
        """Post one round; several may be in flight, in the same order on all ranks.

        Collective over the transport's ranks, including those that move nothing.

        Args:
            sends: [elements] flat messages for each peer, ascending, of one element type.
            receives: Memory for the messages from each peer, ascending, of the sizes that it sends.
                Without ``many_messages`` each peer has at most one, and all of a direction are
                adjacent in one buffer.
            dtype: Element type of the round, also on ranks that move nothing: device collectives
                may compare it.
        """
        ...

    def all_gather(self, message: bytes) -> list[bytes]:
        """Return every rank's message, by rank; all have the same length. Collective."""
        ...


class _GroupTransport:
    """The common part of transports over a process group."""

    def __init__(self, world: int, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self._world = world
        self.device = device
        self._group = group

    def all_gather(self, message: bytes) -> list[bytes]:
        mine = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        if self._world <= FROM_RANKS:  # one collective of the device; two levels are the host's
            mine = mine.to(self.device)
        return [bytes(other.tolist()) for other in gather_rows(mine, self._group).cpu()]


class AllToAllTransport(_GroupTransport):
    """One all-to-all-v per round over a process group that holds all ranks. Collective."""

    many_messages = False

    def start(self, sends: Tensors, receives: Tensors, dtype: torch.dtype) -> Pending:
        outgoing, incoming = (_joined(m, dtype, self.device) for m in (sends, receives))
        received, sent = (
            [sum(m.numel() for m in of_peers.get(p, ())) for p in range(self._world)]
            for of_peers in (receives, sends)
        )
        work: Pending = dist.all_to_all_single(
            incoming, outgoing, received, sent, group=self._group, async_op=True
        )
        return work


@dataclass(frozen=True, slots=True)
class _All:
    """Several operations that have started and are waited for together."""

    works: Sequence[Pending]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class PointToPointTransport(_GroupTransport):
    """One send or receive per message, only between ranks that have something for each other."""

    many_messages = True

    def start(self, sends: Tensors, receives: Tensors, dtype: torch.dtype) -> Pending:
        operations = [
            dist.P2POp(kind, message, peer, self._group)
            for kind, of_peers in ((dist.irecv, receives), (dist.isend, sends))
            for peer, messages in of_peers.items()
            for message in messages
        ]
        works: list[Any] = dist.batch_isend_irecv(operations) if operations else []
        return _All(works)


def _joined(messages: Tensors, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the one buffer in which messages are adjacent."""
    several = [message for of_peer in messages.values() for message in of_peer]
    if not several:
        return torch.empty(0, dtype=dtype, device=device)
    end = several[0].data_ptr()
    for message in several:
        assert message.data_ptr() == end, "messages of a direction must follow each other"
        end += message.numel() * message.element_size()
    size = sum(message.numel() for message in several)
    return several[0].as_strided((size,), (1,))


def make_transport(
    name: str, world: int, device: torch.device, group: dist.ProcessGroup | None = None
) -> Transport:
    """Make the transport that ``--reshard-transport`` names."""
    if name == "p2p" or (name == "auto" and device.type == "cpu"):
        return PointToPointTransport(world, device, group)
    return AllToAllTransport(world, device, group)
