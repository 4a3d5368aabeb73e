"""Redistributions of simulated ranks in one process, and what they must come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mindspeed_rl.core.layout import ParallelLayout
from mindspeed_rl.core.stages import even_stages
from mindspeed_rl.samples.columns import ROLLOUT_LOGPROBS, TOKEN_IDS, Column
from mindspeed_rl.samples.device_cache import TensorCache
from mindspeed_rl.samples.exchange import (
    AXES,
    Hop,
    OwnerRanks,
    Redistribution,
    plan_hops,
    sample_words,
)
from mindspeed_rl.samples.rollout_info import RolloutInfo, SampleKey

EXPERTS = Column("experts", torch.uint8, "the engine", 3)
COLUMNS = (TOKEN_IDS, ROLLOUT_LOGPROBS, EXPERTS)
STEP = 5


def layout_of(world: int, tp: int = 1, pp: int = 1, cp: int = 1) -> ParallelLayout:
    stages = even_stages(pp, pp)
    return ParallelLayout.build(world=world, stages=stages, tp=tp, cp=cp)


@dataclass(frozen=True)
class Case:
    """A redistribution: sample ``i`` has ``lengths[i]`` tokens, is on the ranks of engine group
    ``groups[i]``, and goes to the data-parallel rank ``destinations[i]``.
    """

    layout: ParallelLayout
    engine_tp: int
    mirrored: bool  # whether all ranks of a group have its samples
    lengths: tuple[int, ...]
    groups: tuple[int, ...]
    destinations: tuple[int, ...]
    one_node: bool = False

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(sorted({0, self.layout.pp - 1}))

    @property
    def samples(self) -> list[RolloutInfo]:
        return [
            RolloutInfo(i, 0, n, n, True, 100 + i, group, 0.0, key=SampleKey(STEP, i))
            for i, (n, group) in enumerate(zip(self.lengths, self.groups, strict=True))
        ]

    @property
    def owner_ranks(self) -> OwnerRanks:
        first = [g * self.engine_tp for g in self.groups]
        return OwnerRanks(first, self.engine_tp if self.mirrored else 1)

    def holds(self, rank: int, item: int) -> bool:
        return 0 <= rank - self.owner_ranks.first[item] < self.owner_ranks.count

    def needs(self, rank: int, item: int) -> bool:
        at = self.layout.coords(rank)
        return at.dp == self.destinations[item] and at.pp in self.stages

    def hops(self, rank: int) -> tuple[Hop, ...]:
        return plan_hops(
            self.owner_ranks,
            self.destinations,
            self.layout,
            self.stages,
            rank,
            one_node=self.one_node,
        )

    def values(self, item: int, column: Column) -> torch.Tensor:
        """What sample ``item`` has, whoever computes it."""
        generator = torch.Generator().manual_seed(1000 * item + len(column.name))
        size = self.lengths[item] * column.width
        if column.dtype is torch.float32:
            return torch.randn(size, generator=generator)
        return torch.randint(
            -100 if column is TOKEN_IDS else 0, 200, (size,), generator=generator
        ).to(column.dtype)

    def cache(self, rank: int) -> TensorCache:
        """What a rank has at first."""
        cache = TensorCache(torch.device("cpu"))
        cache.begin_step(STEP)
        mine = [i for i in range(len(self.lengths)) if self.holds(rank, i)]
        for column in COLUMNS:
            flat = [self.values(i, column) for i in mine]
            cache.put(
                column,
                [SampleKey(STEP, i) for i in mine],
                torch.cat(flat) if flat else torch.empty(0),
                [self.lengths[i] for i in mine],
                [100 + i for i in mine],
            )
        return cache

    def part(self, rank: int) -> Redistribution:
        return Redistribution(self.cache(rank), self.samples, COLUMNS, self.hops(rank))

    def check(self, rank: int, part: Redistribution) -> None:
        """The rank has the samples that it needs, bit for bit."""
        for i in range(len(self.lengths)):
            for column in COLUMNS if self.needs(rank, i) else ():
                found, expected = part.read(i, column), self.values(i, column)
                assert found.dtype is expected.dtype
                assert torch.equal(found, expected), (rank, i, column.name)

    def words(self, items: Sequence[int]) -> int:
        words = sample_words(COLUMNS, self.samples)
        return sum(words[i] for i in items)


def simulate(case: Case) -> dict[str, int]:
    """All ranks in one process: checks messages and results; the words that moved by axis."""
    world = case.layout.world
    parts = [case.part(rank) for rank in range(world)]
    moved = dict.fromkeys(("world",) if case.one_node else AXES, 0)
    for axis in ("world",) if case.one_node else AXES:
        hops = {r: hop for r, part in enumerate(parts) for hop in part.hops if hop.axis == axis}
        messages: dict[tuple[int, int], torch.Tensor] = {}
        for rank, hop in hops.items():
            assert rank in hop.peers and rank not in hop.sends and rank not in hop.receives
            for peer in hop.peers:  # the collective is entered by all of a group or by none
                assert hops[peer].peers == hop.peers
            outgoing, sizes = parts[rank].outgoing(hop)
            for peer, message in zip(hop.peers, torch.split(outgoing, sizes), strict=True):
                messages[rank, peer] = message
            moved[axis] += sum(sizes)
            assert sum(sizes) == case.words([i for s in hop.sends.values() for i in s])
        for rank, hop in hops.items():
            for peer in hop.peers:  # both ends expect the same
                mine, theirs = hop.receives.get(peer, ()), hops[peer].sends.get(rank, ())
                assert mine == theirs
            parts[rank].take(hop, torch.cat([messages[peer, rank] for peer in hop.peers]))
    for rank, part in enumerate(parts):
        case.check(rank, part)
    return moved
