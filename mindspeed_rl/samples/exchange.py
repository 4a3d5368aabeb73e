"""The exchange of samples: from the ranks that have them to the ranks that train on them.

First the routes, which are pure functions of the sample table: every rank computes its own part,
without communication. A sample moves along one axis of the training grid at a time, so each hop is
one collective of a group that training uses anyway: first one copy goes to a data-parallel rank,
then it goes to those of its pipeline stages, context and tensor ranks that lack it. On one node
samples go directly, in one collective of the world. A hop in which a group moves nothing is left
out.

Then the transfer. On each hop all tensors of all samples for a rank travel as one message of 32-bit
words, and all messages of a group in one all-to-all-v. The lengths of messages follow from the
sample table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from mindspeed_rl.core.layout import ParallelLayout
from mindspeed_rl.samples.columns import WORD_BYTES, Column
from mindspeed_rl.samples.device_cache import SamplePart, TensorCache, as_words, join
from mindspeed_rl.samples.rollout_info import RolloutInfo

#: Axes of hops, in order; ``dp-cp`` are the ranks of a stage that hold the same dense weights.
AXES = ("dp-cp", "pp", "cp", "tp")

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Hop:
    """What one rank sends and receives in one collective.

    Attributes:
        axis: Axis of the training grid, or ``world``.
        peers: Global ranks of the group, ascending.
        sends: Positions in the list of samples, ascending, by the global rank that they go to.
        receives: Positions in the list of samples, ascending, by the global rank that sends them.
    """

    axis: str
    peers: tuple[int, ...]
    sends: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    receives: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OwnerRanks:
    """The ranks that have each sample: ``count`` consecutive ranks.

    Attributes:
        first: First rank that has each sample.
        count: Number of ranks that have it.
    """

    first: Sequence[int]
    count: int = 1

    @property
    def ranks(self) -> Ints:
        """All ranks that have each sample: [samples, count]."""
        first = np.asarray(self.first, dtype=np.int64)
        return first[:, None] + np.arange(self.count)


def plan_hops(
    owner_ranks: OwnerRanks,
    destinations: Sequence[int],
    layout: ParallelLayout,
    stages: Collection[int],
    rank: int,
    *,
    one_node: bool = False,
) -> tuple[Hop, ...]:
    """Plan the hops of one rank, in the order of :data:`AXES`; on one node a single hop. Pure.

    Args:
        owner_ranks: Ranks that have each sample.
        destinations: Data-parallel rank that trains on each sample.
        layout: Training layout.
        stages: Pipeline stages that need samples.
        rank: Rank to plan for.
        one_node: Whether all ranks are on one node. No route is shorter than another there, so
            every copy goes directly to its place, in one collective of the world.
    """
    ranks = owner_ranks.ranks
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


def copies_moved(owner_ranks: OwnerRanks, layout: ParallelLayout, stages: Collection[int]) -> Ints:
    """Count the copies of each sample that move, for each rank that could train on it. Pure.

    The hops of all ranks move a copy to every place of the data-parallel rank that needs the sample
    and lacks it, and one more where the first copy arrives at a stage that does not need it. On one
    node that one does not move; it is counted all the same, so that the placement does not depend
    on the number of nodes.

    Args:
        owner_ranks: Ranks that have each sample.
        layout: Training layout.
        stages: Pipeline stages that need samples.

    Returns:
        [samples, data-parallel ranks] int64.
    """
    ranks = owner_ranks.ranks
    dp = ranks // (layout.tp * layout.cp) % layout.dp
    needed = np.isin(ranks // layout.ranks_per_stage, sorted(stages))
    item = np.arange(len(ranks))
    row = np.broadcast_to(item[:, None], dp.shape)
    here, useful = (np.zeros((len(ranks), layout.dp), dtype=np.int64) for _ in range(2))
    np.add.at(here, (row, dp), 1)
    np.add.at(useful, (row, dp), needed)
    between = ~needed[item, item % owner_ranks.count]
    places = len(stages) * layout.tp * layout.cp
    return np.where(here > 0, places - useful, places + between[:, None])


def plan_gather(owner_ranks: OwnerRanks, to: int, world: int, rank: int) -> tuple[Hop, ...]:
    """Plan the hop over the world that brings every sample to rank ``to``. Pure."""
    ranks = owner_ranks.ranks
    away = np.flatnonzero(~(ranks == to).any(1))
    moves = _Moves(away, ranks[away, 0], np.full(len(away), to))
    hop = _hop("world", range(world), rank, [moves])
    return () if hop is None else (hop,)


@dataclass(frozen=True, slots=True)
class _Moves:
    """Moves of samples, each from one rank to another: three arrays of equal length."""

    items: Ints
    sources: Ints
    targets: Ints


def _hop(axis: str, peers: Sequence[int], rank: int, moves: Sequence[_Moves]) -> Hop | None:
    """Return the part of ``rank`` in some moves; ``None`` when nothing moves between its peers."""
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
    """Move a copy of each sample that its data-parallel rank lacks to the same place there.

    Where several ranks have a sample they take turns in sending.
    """
    own = layout.tp * layout.cp
    away = np.flatnonzero(~(ranks // own % layout.dp == wanted[:, None]).any(1))
    sources = ranks[away, away % ranks.shape[1]]
    return _Moves(away, sources, sources + (wanted[away] - sources // own % layout.dp) * own)


def _straight(ranks: Ints, wanted: Ints, layout: ParallelLayout, stages: Collection[int]) -> _Moves:
    """Copy each sample to every place that needs and lacks it; owner ranks take turns."""
    own = layout.tp * layout.cp
    place = np.add.outer(layout.ranks_per_stage * np.array(sorted(stages)), np.arange(own)).ravel()
    targets = own * wanted[:, None] + place
    lacking = ~(targets[:, :, None] == ranks[:, None]).any(2)
    items, places = np.nonzero(lacking)
    sources = ranks[items, (items + places) % ranks.shape[1]]
    return _Moves(items, sources, targets[items, places])


class _Block:
    """The ranks of one data-parallel rank, and which of them have its samples, hop after hop.

    Places of the block are numbered like ranks: tensor ranks are neighbours, then context ranks,
    then stages.

    Args:
        arrived: Moves of the first hop of all ranks.
        ranks: [samples, owner ranks] before that hop.
        wanted: [samples] data-parallel rank that trains on each.
        layout: Training layout.
        dp: Data-parallel rank of the block.
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
        """Return ``rank`` and the ranks of the block that differ from it only along ``axis``."""
        here = int(np.flatnonzero(self._rank_of == rank)[0])
        others = [name for name in self._coords if name != axis]
        same = np.all([self._coords[o] == self._coords[o][here] for o in others], axis=0)
        return [int(r) for r in self._rank_of[same]]

    def serve(self, axis: str, stages: Sequence[int]) -> list[_Moves]:
        """Return the moves of one hop between all ranks of the block, and record them as done."""
        before = self._have.copy()
        return [self._supply(before, axis, target) for target in self._targets(axis, stages)]

    def _targets(self, axis: str, stages: Sequence[int]) -> Iterator[dict[str, int]]:
        """Yield the parts of the block that must have every sample after a hop."""
        for stage in stages:
            for cp in range(self._layout.cp if axis != "pp" else 1):
                for tp in range(self._layout.tp if axis == "tp" else 1):
                    at = {"pp": stage, "cp": cp, "tp": tp}
                    yield {name: at[name] for name in AXES[1 : AXES.index(axis) + 1]}

    def _supply(self, before: Bools, axis: str, target: Mapping[str, int]) -> _Moves:
        """Move samples to a part that lacks them, from ranks that differ along ``axis`` only."""
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
        """Return the places with these coordinates, as a mask."""
        found = np.ones(len(self._rank_of), dtype=bool)
        for axis, value in at.items():
            found &= self._coords[axis] == value
        return found


class Redistribution:
    """The part of one rank in a redistribution.

    Args:
        cache: Cache with the samples that this rank has.
        samples: All samples, in the order of the plan.
        columns: Columns that are moved.
        hops: Hops of this rank.
    """

    def __init__(
        self,
        cache: TensorCache,
        samples: Sequence[RolloutInfo],
        columns: Sequence[Column],
        hops: Sequence[Hop],
    ) -> None:
        self._cache = cache
        self._samples = samples
        self._columns = columns
        self.hops = hops
        #: Bytes sent to other ranks.
        self.sent_bytes = 0
        #: For each column, the samples that have arrived.
        self._arrived: dict[str, dict[int, SamplePart]] = {column.name: {} for column in columns}
        self._num_words = sample_words(columns, samples)

    def run(self, group_of: Callable[[str], dist.ProcessGroup | None]) -> None:
        """Carry out all hops, each as one all-to-all-v. Collective: the groups of the hops.

        Args:
            group_of: Function that returns this rank's process group along an axis.
        """
        for hop in self.hops:
            outgoing, sent = self.outgoing(hop)
            received = self._sizes(hop, hop.receives)
            incoming = outgoing.new_empty(sum(received))
            group = group_of(hop.axis)
            dist.all_to_all_single(incoming, outgoing, received, sent, group=group)
            self.sent_bytes += WORD_BYTES * sum(sent)
            self.take(hop, incoming)

    def outgoing(self, hop: Hop) -> tuple[torch.Tensor, list[int]]:
        """Return the messages to all peers, and the words of each. Local.

        Raises:
            RuntimeError: A sample is missing, or differs in length from the sample table.
        """
        views: list[torch.Tensor] = []
        for peer in hop.peers:
            items = hop.sends.get(peer, ())
            for column in self._columns if items else ():
                views += as_words(column, self._parts(items, column))
        sizes = self._sizes(hop, hop.sends)
        if not views:
            return torch.empty(0, dtype=torch.int32, device=self._cache.device), sizes
        return torch.cat(views), sizes

    def take(self, hop: Hop, incoming: torch.Tensor) -> None:
        """Record what has arrived: from each peer all samples, column after column. Local."""
        start = 0
        for peer in hop.peers:
            for column in self._columns:
                arrived = self._arrived[column.name]
                for item in hop.receives.get(peer, ()):
                    assert item not in arrived, f"sample {item} arrives twice"
                    num_tokens = self._samples[item].num_tokens
                    arrived[item] = SamplePart(incoming, start, num_tokens)
                    start += column.num_words(num_tokens)
        assert start == incoming.numel(), f"{incoming.numel()} words arrived, {start} expected"

    def read(self, item: int, column: Column) -> torch.Tensor:
        """Return a sample that this rank had or received: [tokens x width]. Do not write to it."""
        return self._parts([item], column)[0].of(column)

    def read_all(self, items: Sequence[int], column: Column) -> torch.Tensor:
        """Concatenate several samples: [sum of tokens x width]; see :meth:`read`."""
        return join(column, self._parts(items, column), self._cache.device)

    def keep(self) -> None:
        """Put what has arrived into the cache. Local."""
        for column in self._columns:
            arrived = self._arrived[column.name]
            samples = [self._samples[item] for item in arrived]
            keys, versions = [s.key for s in samples], [s.weights_version for s in samples]
            self._cache.put_parts(column, keys, versions, list(arrived.values()))
            arrived.clear()

    def _parts(self, items: Sequence[int], column: Column) -> list[SamplePart]:
        """Return where the tensors of samples are.

        Raises:
            RuntimeError: A sample is missing, or differs in length from the sample table.
        """
        arrived = self._arrived[column.name]
        parts = []
        for item in items:
            part, sample = arrived.get(item), self._samples[item]
            if part is None:
                part = self._cache.find(column, sample.key, sample.weights_version)
            if part.num_tokens != sample.num_tokens:
                raise RuntimeError(
                    f"{column.name!r} of sample {sample.key.number} of step {sample.key.step} has "
                    f"{part.num_tokens} tokens; the table says {sample.num_tokens}"
                )
            parts.append(part)
        return parts

    def _sizes(self, hop: Hop, items: Mapping[int, Sequence[int]]) -> list[int]:
        """Return the words of each peer's message."""
        return [sum(self._num_words[i] for i in items.get(peer, ())) for peer in hop.peers]


def sample_words(columns: Sequence[Column], samples: Sequence[RolloutInfo]) -> list[int]:
    """Return the 32-bit words that each sample has on the wire. Pure."""
    lengths = {s.num_tokens for s in samples}
    words = {length: sum(column.num_words(length) for column in columns) for length in lengths}
    return [words[s.num_tokens] for s in samples]
