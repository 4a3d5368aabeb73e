"""All ranks of a job in one process: a thread per rank, messages through a table.

The product's own executor runs unchanged on every thread; only the wire is replaced. Every message
must be expected by its receiver with its exact size, else the whole world stops with an error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from mindspeed_rl.weights.transports import Tensors

Result = TypeVar("Result")


class LocalWorld:
    """The shared side of the transports of ``size`` ranks."""

    def __init__(self, size: int, timeout_s: float = 30.0) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=timeout_s)
        # exchange, from, to
        self.messages: dict[tuple[int, int, int], list[torch.Tensor]] = {}
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
    receives: Tensors

    def wait(self) -> None:
        """Wait for all ranks, take the own messages. Collective."""
        world = self.world
        world.barrier.wait()
        posted = {f for n, f, to in list(world.messages) if (n, to) == (self.number, self.rank)}
        assert posted == set(self.receives), (
            f"rank {self.rank} expects messages from {sorted(self.receives)}, "
            f"but {sorted(posted)} sent some"
        )
        # Nobody may change the table while others still look for their senders.
        world.barrier.wait()
        for peer, parts in self.receives.items():
            messages = world.messages.pop((self.number, peer, self.rank))
            expected, sent = ([m.numel() for m in several] for several in (parts, messages))
            assert expected == sent, (
                f"rank {self.rank} expects {expected} elements from {peer}, got {sent}"
            )
            for part, message in zip(parts, messages, strict=True):
                part.copy_(message)
        world.barrier.wait()


class LocalTransport:
    """One rank's end of a :class:`LocalWorld`.

    Attributes:
        num_exchanges: calls of :meth:`start`.
        num_gathers: calls of :meth:`all_gather`.
    """

    def __init__(self, world: LocalWorld, rank: int) -> None:
        self._world = world
        self._rank = rank
        self.sent_bytes = 0
        self.received_bytes = 0
        self.num_gathers = 0
        self.device = torch.device("cpu")
        self.many_messages = False
        self.num_exchanges = 0

    def start(self, sends: Tensors, receives: Tensors, dtype: torch.dtype) -> LocalPending:
        """Post this rank's messages."""
        everything = [m for several in (*sends.values(), *receives.values()) for m in several]
        assert {m.dtype for m in everything} <= {dtype}
        world, self.num_exchanges = self._world, self.num_exchanges + 1
        for peer, messages in sends.items():
            assert peer != self._rank, f"rank {self._rank} sends to itself"
            assert self.many_messages or len(messages) == 1
            # not copied, so that what is overwritten too early arrives wrong
            world.messages[self.num_exchanges, self._rank, peer] = list(messages)
        self.sent_bytes += _num_bytes(sends)
        self.received_bytes += _num_bytes(receives)
        return LocalPending(world, self._rank, self.num_exchanges, receives)

    def all_gather(self, message: bytes) -> list[bytes]:
        """Post this rank's message, wait for all ranks, read all. Collective."""
        world = self._world
        self.num_gathers += 1
        world.gathered[self._rank] = message
        world.barrier.wait()
        everyone = [world.gathered[rank] for rank in range(world.size)]
        world.barrier.wait()
        return everyone


def _num_bytes(messages: Tensors) -> int:
    return sum(m.numel() * m.element_size() for several in messages.values() for m in several)
