"""Bandwidth of the bare collectives: large contiguous buffers, nothing packed or unpacked."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from bench.wire import Group, TrainerGroups, Wire

RAW_BYTES = 32 << 20  # of a rank's message to all others
WORLD = ("exchange", "world")
# what torch offers for an all-gather; the baselines use the faster spread
LIBRARY_GATHER = ("all_gather", "tp")


class RawCollectives:
    """Every collective that the baselines use, and the all-to-all over the world.

    Args:
        groups: of the trainer.
        world: number of ranks.
        rank: global rank.
    """

    def __init__(self, groups: TrainerGroups, world: int, rank: int) -> None:
        everyone = Group("world", tuple(range(world)), rank, None)
        axes = (groups.tp, groups.pp, groups.etp, groups.ep)
        self._runs: dict[tuple[str, str], Callable[[Wire], None]] = {}
        self._num_slots = max(len(axis.ranks) for axis in axes)
        self._buffer = torch.ones(self._num_slots * RAW_BYTES // 2, dtype=torch.bfloat16)
        self._message = torch.ones(RAW_BYTES // 2, dtype=torch.bfloat16)
        self._add_exchange(everyone)
        if len(groups.block.ranks) > 1:
            self._add_exchange(groups.block)
        for axis in axes:
            if len(axis.ranks) > 1:
                self._add_spread(axis)
        if len(groups.tp.ranks) > 1:
            self._runs[LIBRARY_GATHER] = lambda wire: self._library_gather(groups.tp, wire)

    def _add_exchange(self, group: Group) -> None:
        peers = len(group.ranks) - 1
        share = self._message.numel() // peers
        sizes = [0 if i == group.index else share for i in range(peers + 1)]
        received, sent = self._buffer[: share * peers], self._message[: share * peers]
        self._runs["exchange", group.name] = lambda wire: wire.exchange(
            received, sent, sizes, sizes, group
        )

    def _add_spread(self, group: Group) -> None:
        slots = list(self._buffer.view(self._num_slots, -1)[: len(group.ranks)])
        self._runs["spread", group.name] = lambda wire: wire.spread(slots, group)

    def _library_gather(self, group: Group, wire: Wire) -> None:
        slots = list(self._buffer.view(self._num_slots, -1)[: len(group.ranks)])
        dist.all_gather(slots, self._message, group=group.handle)
        wire.received_bytes += (len(group.ranks) - 1) * RAW_BYTES

    def measure(self) -> dict[tuple[str, str], float]:
        """Received bytes per second and rank, each collective once. Collective: the world."""
        speeds = {}
        for key, run in self._runs.items():
            wire = Wire()
            dist.barrier()
            start_s = time.perf_counter()
            run(wire)
            dist.barrier()
            speeds[key] = wire.received_bytes / (time.perf_counter() - start_s)
        return speeds
