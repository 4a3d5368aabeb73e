"""The way of every sample from the ranks that have it to the ranks that train on it.

Pure functions of the sample table: every rank finds its own part, and nothing is negotiated. A
sample goes along one axis of the training grid at a time, so each hop is one collective of a group
that training uses anyway: first to a data-parallel rank, once, then to the pipeline stages, context
and tensor ranks of it that lack it. On one node it goes straight, in one collective of the world.
A hop on which a group moves nothing does not exist.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mindspeed_rl.core.layout import ParallelLayout

#: axes of hops, in order; ``dp-cp`` are the ranks of a stage that hold the same dense weights
AXES = ("dp-cp", "pp", "cp", "tp")

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Hop:
    """What one rank sends and receives in one collective.

    Attributes:
        axis: of the training grid, or ``world``.
        peers: global ranks of the group, ascending.
        sends: by global rank, positions in the list of samples, ascending.
        receives: the same.
    """

    axis: str
    peers: tuple[int, ...]
    sends: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    receives: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OwnerRanks:
    """Where samples are: on ``count`` consecutive ranks each.

    Attributes:
        first: of each sample, the first rank that has it.
        count: ranks that have it.
    """

    first: Sequence[int]
    count: int = 1


def plan_hops(
    owner_ranks: OwnerRanks,
    destinations: Sequence[int],
    layout: ParallelLayout,
    stages: Collection[int],
    rank: int,
    *,
    one_node: bool = False,
) -> tuple[Hop, ...]:
    """The hops of one rank, in the order of :data:`AXES`; on one node a single one. Pure.

    Args:
        owner_ranks: where each sample is.
        destinations: the data-parallel rank that trains on each.
        layout: of training.
        stages: pipeline stages that need samples.
        rank: whose part.
        one_node: all ranks are on one: no way is shorter than another, so every copy goes straight
            to its place, and one collective of the world does it.
    """
    first = np.asarray(owner_ranks.first, dtype=np.int64).reshape(-1, 1)
    ranks = first + np.arange(owner_ranks.count)
    wanted = np.asarray(destinations, dtype=np.int64)
    if one_node:
        hop = _hop("world", range(layout.world), rank, [_straight(ranks, wanted, layout, stages)])
        return () if hop is None else (hop,)
    at = layout.coords(rank)
    moves = _to_blocks(ranks, wanted, layout)
    hops = [_hop("dp-cp", layout.replicas(at.tp, at.pp), rank, [moves])]
    block = _Block(moves, ranks, wanted, layout, at.dp)
    for axis in AXES[1:]:
        hops.append(_hop(axis, block.peers(axis, rank), rank, block.serve(axis, sorted(stages))))
    return tuple(hop for hop in hops if hop is not None)


def copies_moved(
    owner_ranks: OwnerRanks, num_samples: int, layout: ParallelLayout, stages: Collection[int]
) -> Ints:
    """How many copies of each sample go from rank to rank, by the rank that it trains on. Pure.

    What the hops of all ranks move in all: a copy to every place of the data-parallel rank that
    needs the sample and lacks it, and one more where the first copy comes to a stage between. On
    one node that one does not move; it counts all the same, so that who trains on what does not
    depend on how many nodes there are.

    Args:
        owner_ranks: where each sample is.
        num_samples: of them.
        layout: of training.
        stages: pipeline stages that need samples.

    Returns:
        [samples, data-parallel ranks] int64.
    """
    first = np.asarray(owner_ranks.first, dtype=np.int64).reshape(num_samples, 1)
    ranks = first + np.arange(owner_ranks.count)
    dp = ranks // (layout.tp * layout.cp) % layout.dp
    needed = np.isin(ranks // layout.ranks_per_stage, sorted(stages))
    item = np.arange(num_samples)
    row = np.broadcast_to(item[:, None], dp.shape)
    here, useful = (np.zeros((num_samples, layout.dp), dtype=np.int64) for _ in range(2))
    np.add.at(here, (row, dp), 1)
    np.add.at(useful, (row, dp), needed)
    between = ~needed[item, item % owner_ranks.count]
    places = len(stages) * layout.tp * layout.cp
    return np.where(here > 0, places - useful, places + between[:, None])


def plan_gather(owner_ranks: OwnerRanks, to: int, world: int, rank: int) -> tuple[Hop, ...]:
    """The hop over the world that brings every sample to rank ``to``. Pure."""
    first = np.asarray(owner_ranks.first, dtype=np.int64)
    away = np.flatnonzero(~((first <= to) & (to < first + owner_ranks.count)))
    moves = _Moves(away, first[away], np.full(len(away), to))
    hop = _hop("world", range(world), rank, [moves])
    return () if hop is None else (hop,)


@dataclass(frozen=True, slots=True)
class _Moves:
    """Some samples, each from one rank to another: three arrays of equal length."""

    items: Ints
    sources: Ints
    targets: Ints


def _hop(axis: str, peers: Sequence[int], rank: int, moves: Sequence[_Moves]) -> Hop | None:
    """The part of ``rank``; ``None`` when nothing moves between its peers."""
    among = [np.isin(m.sources, peers) for m in moves]
    if not any(a.any() for a in among):
        return None
    sends: dict[int, list[int]] = {}
    receives: dict[int, list[int]] = {}
    for m in moves:
        for mine, others, found in (
            (m.sources == rank, m.targets, sends),
            (m.targets == rank, m.sources, receives),
        ):
            for item, other in zip(m.items[mine].tolist(), others[mine].tolist(), strict=True):
                found.setdefault(other, []).append(item)
    return Hop(axis, tuple(peers), _ordered(sends), _ordered(receives))


def _ordered(items: Mapping[int, Sequence[int]]) -> dict[int, tuple[int, ...]]:
    return {peer: tuple(sorted(items[peer])) for peer in sorted(items)}


def _to_blocks(ranks: Ints, wanted: Ints, layout: ParallelLayout) -> _Moves:
    """One copy of each sample that no rank of its data-parallel rank has, to the same place there.

    Where several ranks have a sample they take turns in sending.
    """
    own = layout.tp * layout.cp
    away = np.flatnonzero(~(ranks // own % layout.dp == wanted[:, None]).any(1))
    sources = ranks[away, away % ranks.shape[1]]
    return _Moves(away, sources, sources + (wanted[away] - sources // own % layout.dp) * own)


def _straight(ranks: Ints, wanted: Ints, layout: ParallelLayout, stages: Collection[int]) -> _Moves:
    """A copy of each sample to every place that needs and lacks it; its owner ranks take turns."""
    own = layout.tp * layout.cp
    place = np.add.outer(layout.ranks_per_stage * np.array(sorted(stages)), np.arange(own)).ravel()
    targets = own * wanted[:, None] + place
    lacking = ~(targets[:, :, None] == ranks[:, None]).any(2)
    items, places = np.nonzero(lacking)
    sources = ranks[items, (items + places) % ranks.shape[1]]
    return _Moves(items, sources, targets[items, places])


class _Block:
    """Which ranks of one data-parallel rank have its samples, hop after hop.

    Places of the block are numbered like ranks: tensor ranks are neighbours, then context ranks,
    then stages.

    Args:
        arrived: the first hop of all ranks.
        ranks: [samples, owner ranks] before it.
        wanted: [samples] data-parallel rank.
        layout: of training.
        dp: which data-parallel rank.
    """

    def __init__(
        self, arrived: _Moves, ranks: Ints, wanted: Ints, layout: ParallelLayout, dp: int
    ) -> None:
        self._layout = layout
        self._items = np.flatnonzero(wanted == dp)
        place = np.arange(layout.tp * layout.cp * layout.pp)
        self._coords = {
            "tp": place % layout.tp,
            "cp": place // layout.tp % layout.cp,
            "pp": place // (layout.tp * layout.cp),
        }
        self._rank_of = (
            self._coords["tp"]
            + layout.tp * (self._coords["cp"] + layout.cp * dp)
            + layout.ranks_per_stage * self._coords["pp"]
        )
        have = (ranks[self._items, :, None] == self._rank_of).any(1)
        row_of = np.full(len(wanted), -1)
        row_of[self._items] = np.arange(len(self._items))
        mine = row_of[arrived.items] >= 0
        have[row_of[arrived.items[mine]]] |= arrived.targets[mine, None] == self._rank_of
        self._have: Bools = have

    def peers(self, axis: str, rank: int) -> list[int]:
        """The ranks that differ from ``rank``, which is one of the block, along one axis only."""
        here = int(np.flatnonzero(self._rank_of == rank)[0])
        others = [name for name in self._coords if name != axis]
        same = np.all([self._coords[o] == self._coords[o][here] for o in others], axis=0)
        return [int(r) for r in self._rank_of[same]]

    def serve(self, axis: str, stages: Sequence[int]) -> list[_Moves]:
        """The moves of one hop between all ranks of the block; they are done afterwards."""
        before = self._have.copy()
        return [self._supply(before, axis, target) for target in self._targets(axis, stages)]

    def _targets(self, axis: str, stages: Sequence[int]) -> Iterator[dict[str, int]]:
        """The parts of the block that must have every sample once a hop is done."""
        for stage in stages:
            for cp in range(self._layout.cp if axis != "pp" else 1):
                for tp in range(self._layout.tp if axis == "tp" else 1):
                    at = {"pp": stage, "cp": cp, "tp": tp}
                    yield {name: at[name] for name in AXES[1 : AXES.index(axis) + 1]}

    def _supply(self, before: Bools, axis: str, target: Mapping[str, int]) -> _Moves:
        """To a part that lacks a sample, from a rank that is elsewhere along ``axis`` only."""
        part = self._places(target)
        rows = np.flatnonzero(~self._have[:, part].any(1))
        near = self._places({name: at for name, at in target.items() if name != axis})
        candidates = before[rows] & near
        assert candidates.any(1).all(), "a sample is out of reach of a rank that needs it"
        sources = candidates.argmax(1)
        step = {"tp": 1, "cp": self._layout.tp, "pp": self._layout.tp * self._layout.cp}[axis]
        targets = sources + (target[axis] - self._coords[axis][sources]) * step
        self._have[rows, targets] = True
        return _Moves(self._items[rows], self._rank_of[sources], self._rank_of[targets])

    def _places(self, at: Mapping[str, int]) -> Bools:
        """The places with these coordinates."""
        found = np.ones(len(self._rank_of), dtype=bool)
        for axis, value in at.items():
            found &= self._coords[axis] == value
        return found
