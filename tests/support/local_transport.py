"""All ranks of a job in one process: a thread per rank, messages through a table.

The product's own executor runs unchanged on every thread; only the wire is replaced. Every message
must be expected by its receiver with its exact size, else the whole world stops with an error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

Result = TypeVar("Result")


class LocalWorld:
    """The shared side of the transports of ``size`` ranks."""

    def __init__(self, size: int, timeout_s: float = 30.0) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=timeout_s)
        self.messages: dict[tuple[int, int, int], torch.Tensor] = {}  # exchange, from, to
        self.gathered: dict[int, bytes] = {}

    def run(self, function: Callable[[int, LocalTransport], Result]) -> list[Result]:
        """Call ``function(rank, transport)`` on all ranks at once; their results in rank order.

        Raises:
            BaseException: the first error that is not merely the echo of another rank's.
        """
        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(self._run_rank, rank, function) for rank in range(self.size)]
        errors = [error for f in futures if (error := f.exception()) is not None]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        if self.messages:
            raise AssertionError(f"messages that nobody received: {sorted(self.messages)}")
        return [f.result() for f in futures]

    def _run_rank(self, rank: int, function: Callable[[int, LocalTransport], Result]) -> Result:
        try:
            return function(rank, LocalTransport(self, rank))
        except BaseException:
            self.barrier.abort()
            raise


@dataclass
class LocalPending:
    """One exchange of one rank on its way."""

    world: LocalWorld
    rank: int
    number: int
    incoming: torch.Tensor
    sizes: Mapping[int, int]

    def wait(self) -> None:
        """Wait for all ranks, take the own messages. Collective."""
        world = self.world
        world.barrier.wait()
        posted = {f for n, f, to in list(world.messages) if (n, to) == (self.number, self.rank)}
        assert posted == set(self.sizes), (
            f"rank {self.rank} expects messages from {sorted(self.sizes)}, "
            f"but {sorted(posted)} sent some"
        )
        # Nobody may change the table while others still look for their senders.
        world.barrier.wait()
        parts = torch.split(self.incoming, list(self.sizes.values()))
        for (peer, size), part in zip(self.sizes.items(), parts, strict=True):
            message = world.messages.pop((self.number, peer, self.rank))
            assert message.numel() == size, (
                f"rank {self.rank} expects {size} elements from {peer}, got {message.numel()}"
            )
            part.copy_(message)
        world.barrier.wait()


class LocalTransport:
    """One rank's end of a :class:`LocalWorld`; counts what it sends and how often it gathers."""

    def __init__(self, world: LocalWorld, rank: int) -> None:
        self._world = world
        self._rank = rank
        self.sent_bytes = 0
        self.received_bytes = 0
        self.num_gathers = 0
        self.device = torch.device("cpu")
        self._started = 0

    def start(
        self,
        outgoing: torch.Tensor,
        send_sizes: Mapping[int, int],
        incoming: torch.Tensor,
        receive_sizes: Mapping[int, int],
    ) -> LocalPending:
        """Post this rank's messages."""
        world, self._started = self._world, self._started + 1
        for peer, message in zip(
            send_sizes, torch.split(outgoing, list(send_sizes.values())), strict=True
        ):
            assert peer != self._rank, f"rank {self._rank} sends to itself"
            world.messages[self._started, self._rank, peer] = message.clone()
        self.sent_bytes += outgoing.numel() * outgoing.element_size()
        self.received_bytes += incoming.numel() * incoming.element_size()
        return LocalPending(world, self._rank, self._started, incoming, receive_sizes)

    def all_gather(self, message: bytes) -> list[bytes]:
        """Post this rank's message, wait for all ranks, read all. Collective."""
        world = self._world
        self.num_gathers += 1
        world.gathered[self._rank] = message
        world.barrier.wait()
        everyone = [world.gathered[rank] for rank in range(world.size)]
        world.barrier.wait()
        return everyone
