"""Choice of a source for every destination of a rectangle.

It is pure arithmetic on the ranks that hold a rectangle and the ranks that need it. Every rank
evaluates the whole (small) assignment of the rectangles that concern it, without asking another
rank. The sender's view is therefore the inverse of the receiver's by construction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ranks = NDArray[np.int64]


class SourceAssignment(NamedTuple):
    """Who sends some rectangles to whom: arrays with an entry per slice and destination.

    Attributes:
        slice: [n] numbers of the slices of all rectangles, ascending.
        hop: [n] 0 where nothing travels, 1 where a holder sends, 2 where a destination on the same
            node forwards what it received in hop 1.
        src: [n] sources; the destination itself where it holds the rectangle.
        dst: [n] destinations, ascending within a slice.
        num_slices: Number of slices of each rectangle.
        is_balanced: Whether every rotation gives the sources the same loads.
    """

    slice: Ranks
    hop: Ranks
    src: Ranks
    dst: Ranks
    num_slices: tuple[int, ...]
    is_balanced: bool

    def only(self, wanted: NDArray[np.bool_]) -> SourceAssignment:
        """Return the entries of some slices, which are numbered anew."""
        kept = wanted[self.slice]
        number = np.cumsum(wanted) - 1
        arrays = number[self.slice[kept]], self.hop[kept], self.src[kept], self.dst[kept]
        first = np.cumsum([0, *self.num_slices[:-1]])
        num_slices = np.add.reduceat(wanted.astype(np.int64), first).tolist()
        return SourceAssignment(*arrays, tuple(num_slices), self.is_balanced)

    @classmethod
    def joined(cls, several: Sequence[SourceAssignment]) -> SourceAssignment:
        """Join the assignments of rectangles that other ranks hold."""
        if len(several) == 1:
            return several[0]
        counts = [sum(one.num_slices) for one in several]
        first = np.cumsum([0, *counts[:-1]])
        return cls(
            np.concatenate([one.slice + start for one, start in zip(several, first, strict=True)]),
            np.concatenate([one.hop for one in several]),
            np.concatenate([one.src for one in several]),
            np.concatenate([one.dst for one in several]),
            tuple(count for one in several for count in one.num_slices),
            all(one.is_balanced for one in several),
        )


class RegionDemand(NamedTuple):
    """A rectangle that some ranks need.

    Attributes:
        destinations: Ranks that need it.
        size: Number of its elements, the cost of sending it once.
        may_slice: Whether it may be cut to even out what its owner ranks send.
    """

    destinations: tuple[range, ...]
    size: int = 1
    may_slice: bool = False


class _Usual(NamedTuple):
    """An assignment, and whether a rotation only passes each source's part on to another one."""

    assignment: SourceAssignment
    turns_as_one: bool


def assign_sources(
    sources: tuple[range, ...],
    demands: tuple[RegionDemand, ...],
    ranks_per_node: int,
    rotation: int = 0,
    num_rotations: int = 1,
    relay: bool = False,
) -> SourceAssignment:
    """Choose a source for every destination of rectangles.

    A destination that holds a rectangle uses its own copy. Other destinations take a holder on
    their node, evenly. The remaining ones are spread over the owner ranks so that the largest
    number of destinations of one owner rank is as small as the first two rules allow. Where several
    owner ranks would do, those that send least of the rectangles before are preferred.

    Args:
        sources: Ranks that hold the rectangles.
        demands: The rectangles and the ranks that need them.
        ranks_per_node: Number of ranks per node.
        rotation: Shift of every choice between equals; give neighbouring tensors consecutive
            rotations, otherwise the first of several owner ranks serves them all.
        num_rotations: Number of tensors that are placed alike, each with a rotation of its own.
            Where it is too small for rotations to even out the loads, rectangles are sliced.
        relay: Let the destinations on each node without a holder receive one slice each and forward
            it to the others on the node.
    """
    if not relay and sum(map(len, sources)) == 1:
        return _from_one(sources[0][0], tuple(demand.destinations for demand in demands))
    usual, turns_as_one = _assign_sources(sources, demands, ranks_per_node, 0, num_rotations, relay)
    if usual.is_balanced:
        return usual
    if turns_as_one:
        return _turned(usual, _ranks(sources), rotation)
    period = sum(map(len, sources)) * (ranks_per_node if relay else 1)
    turn = rotation % period
    return _assign_sources(sources, demands, ranks_per_node, turn, num_rotations, relay).assignment


@lru_cache(maxsize=1 << 16)
def _from_one(source: int, destinations: tuple[tuple[range, ...], ...]) -> SourceAssignment:
    """Assign the only source there is, without a relay."""
    number, dst = _destinations(destinations)
    hop = (dst != source).astype(np.int64)
    return SourceAssignment(
        number, hop, np.full(dst.size, source), dst, (1,) * len(destinations), True
    )


@lru_cache(maxsize=1 << 12)
def _destinations(several: tuple[tuple[range, ...], ...]) -> tuple[Ranks, Ranks]:
    """Return the destinations of some slices one after another, and the number of each slice."""
    parts = [_ranks(destinations) for destinations in several]
    return np.repeat(np.arange(len(parts)), [part.size for part in parts]), np.concatenate(parts)


def _turned(usual: SourceAssignment, src: Ranks, rotation: int) -> SourceAssignment:
    """Rotate an assignment without sources on the destinations' nodes, where all are alike."""
    travels = np.flatnonzero(usual.hop)
    place = usual.slice[travels] * src.size + np.searchsorted(src, usual.src[travels])
    count = sum(usual.num_slices)
    shares = np.bincount(place, minlength=count * src.size).reshape(count, src.size)
    turned = np.roll(shares, rotation * travels.size, axis=1)
    source = usual.src.copy()
    source[travels] = np.repeat(np.tile(src, count), turned.ravel())
    return SourceAssignment(
        usual.slice, usual.hop, source, usual.dst, usual.num_slices, usual.is_balanced
    )


@lru_cache(maxsize=1 << 16)
def _assign_sources(
    sources: tuple[range, ...],
    demands: tuple[RegionDemand, ...],
    ranks_per_node: int,
    rotation: int,
    num_rotations: int,
    relay: bool,
) -> _Usual:
    """Compute :func:`assign_sources`, cached for every rotation that makes a difference."""
    known = [_fixed(sources, rectangle.destinations, ranks_per_node) for rectangle in demands]
    relayed = [relay and fixed.fan_out > 1 for fixed in known]
    direct = [fixed for fixed, passes_on in zip(known, relayed, strict=True) if not passes_on]
    count = _num_slices(_shares(direct), num_rotations)
    parts = [
        fixed.fan_out if passes_on else count if rectangle.may_slice else 1
        for fixed, passes_on, rectangle in zip(known, relayed, demands, strict=True)
    ]
    order = _Order(known, parts, relayed, rotation)
    sizes = [rectangle.size / count for rectangle, count in zip(demands, parts, strict=True)]
    # Nodes with owner ranks leave no other choice, so the rest is balanced against their loads.
    near = [
        [order.near_choice(fixed, size) for _ in range(count)]
        for fixed, size, count in zip(known, sizes, parts, strict=True)
    ]
    found = [
        _assign(fixed, order, choice, size, rotation + i if passes_on else None)
        for fixed, choices, size, passes_on in zip(known, near, sizes, relayed, strict=True)
        for i, choice in enumerate(choices)
    ]
    of_slices = zip(demands, parts, strict=True)
    number, dst = _destinations(tuple(d.destinations for d, n in of_slices for _ in range(n)))
    source, hop, balanced = zip(*found, strict=True)
    joined = np.concatenate(hop), np.concatenate(source), dst
    return _Usual(
        SourceAssignment(number, *joined, tuple(parts), all(balanced)),
        not relay and not any(fixed.near.index.size for fixed in known),
    )


# More slices of one matrix would gain little, and so would an unevenness below this.
_MAX_SLICES, _EVEN = 8, 1.1


def _shares(known: Sequence[_Fixed]) -> frozenset[tuple[int, int]]:
    """Return (destinations, sources) of each group of sources, summed over rectangles."""
    destinations: Counter[tuple[int, int]] = Counter()
    for fixed in known:
        runs = zip(fixed.near.first.tolist(), fixed.near.count.tolist(), strict=True)
        destinations.update(runs)
        destinations[-1, fixed.src.size] += fixed.far.index.size
    return frozenset((number, count) for (_, count), number in destinations.items() if number)


@lru_cache(maxsize=1 << 12)
def _num_slices(shares: frozenset[tuple[int, int]], num_rotations: int) -> int:
    """Return the number of slices of a matrix that lets rotations even out its owner ranks' loads.

    When n destinations are divided among h owner ranks t times, each owner rank serves t n / h of
    them, rounded up at most.
    """

    def unevenness(parts: int) -> float:
        rotations = num_rotations * parts
        return max((-(-rotations * n // h) * h / (rotations * n) for n, h in shares), default=1.0)

    several = range(1, _MAX_SLICES)
    return next((parts for parts in several if unevenness(parts) <= _EVEN), _MAX_SLICES)


class _Order:
    """Preference among the owner ranks of some rectangles: those that have sent least come first.

    Owner ranks that have sent equally much are rotated by as many places as one rotation assigns,
    so that the next tensor starts where this one ends.
    """

    def __init__(
        self, known: Sequence[_Fixed], parts: Sequence[int], relayed: Sequence[bool], rotation: int
    ) -> None:
        first = known[0]
        size = first.src.size
        near, far = np.zeros(size, np.int64), 0
        for fixed, count, passes_on in zip(known, parts, relayed, strict=True):
            np.add.at(near, fixed.near.first, count)
            entering = np.unique(fixed.far.node) if passes_on else fixed.far.node
            far += count * entering.size
        of_node = np.searchsorted(first.src_node, first.src_node, "left")
        in_node = np.searchsorted(first.src_node, first.src_node, "right") - of_node
        place = np.arange(size)
        self._node = first.src_node
        self._near_tie = (place - of_node - rotation * near[of_node]) % in_node
        self._far_tie = (place - rotation * far) % size
        self._load = np.zeros(size)

    def near_choice(self, fixed: _Fixed, size: float) -> Ranks:
        """Choose a source for each destination that has one on its node: [near] indices."""
        near = fixed.near
        in_order = np.lexsort((self._near_tie, self._load, self._node))
        choice: Ranks = in_order[near.first + near.position % near.count]
        self.add(np.bincount(choice, minlength=fixed.src.size), size)
        return choice

    def last(self, takers: Ranks, count: int) -> Ranks:
        """Return the ``count`` sources among ``takers`` that come last in the order."""
        found: Ranks = takers[np.lexsort((self._far_tie[takers], self._load[takers]))]
        return found[found.size - count :]

    def add(self, loads: Ranks, size: float) -> None:
        """Add what each source sends of a slice to its load."""
        self._load = self._load + loads * size


def _assign(
    fixed: _Fixed, order: _Order, choice: Ranks, size: float, rotation: int | None
) -> tuple[Ranks, Ranks, bool]:
    """Return source and hop of each destination of a slice, and whether rotations share evenly.

    A slice with a ``rotation`` is relayed.
    """
    src, dst, far, hop = fixed.src, fixed.dst, fixed.far, fixed.hop
    source = fixed.source.copy()
    source[fixed.near.index] = src[choice]
    entering = far.index
    if rotation is not None:
        leaders = far.first + (rotation + far.node) % far.count
        passed_on = leaders != np.arange(far.index.size)
        source[far.index[passed_on]] = dst[far.index[leaders[passed_on]]]
        hop = hop.copy()
        hop[far.index[passed_on]] = 2
        entering = far.index[~passed_on]
    loads = np.bincount(choice, minlength=src.size)
    shares, surplus = _level(loads, entering.size, order)
    order.add(shares, size)
    source[entering] = np.repeat(src, shares)
    return source, hop, rotation is None and fixed.near_is_balanced and not surplus


@dataclass(frozen=True, eq=False, slots=True)
class _ReplicaGroup:
    """Some destinations, and for each the run of ranks that its choice rotates in.

    Attributes:
        index: [n] indices of the destinations.
        node: [n] nodes of the destinations.
        first: [n] start of the run: in the sources (near), or in this group (far).
        count: [n] length of the run.
        position: [n] position of the destination among the group's destinations on its node.
    """

    index: Ranks
    node: Ranks
    first: Ranks
    count: Ranks
    position: Ranks


@dataclass(frozen=True, eq=False, slots=True)
class _Fixed:
    """The part of an assignment that no rotation changes.

    Attributes:
        src: [S] sources, ascending.
        src_node: [S] nodes of the sources.
        dst: [D] destinations, ascending.
        source: [D] the destination itself where it is a source, otherwise -1.
        hop: [D] 0 where the destination is a source, otherwise 1.
        near: Destinations with a source on their node; the runs are runs of sources.
        far: All other destinations without a copy of their own; the runs are runs of destinations.
        near_is_balanced: Whether all sources of a node serve equally many destinations on it.
        fan_out: The largest number of destinations on a node without a source.
    """

    src: Ranks
    src_node: Ranks
    dst: Ranks
    source: Ranks
    hop: Ranks
    near: _ReplicaGroup
    far: _ReplicaGroup
    near_is_balanced: bool
    fan_out: int


@lru_cache(maxsize=1 << 14)
def _fixed(
    sources: tuple[range, ...], destinations: tuple[range, ...], ranks_per_node: int
) -> _Fixed:
    src, dst = _ranks(sources), _ranks(destinations)
    found = np.minimum(np.searchsorted(src, dst), src.size - 1)
    source = np.where(src[found] == dst, dst, -1)
    hop = (source < 0).astype(np.int64)
    src_node, dst_node = src // ranks_per_node, dst // ranks_per_node
    first = np.searchsorted(src_node, dst_node, "left")
    count = np.searchsorted(src_node, dst_node, "right") - first
    index = np.flatnonzero((source < 0) & (count > 0))
    position, length = _runs(dst_node[index])
    near = _ReplicaGroup(index, dst_node[index], first[index], count[index], position)
    near_is_balanced = not (length % near.count).any()
    index = np.flatnonzero((source < 0) & (count == 0))
    position, length = _runs(dst_node[index])
    begins = np.arange(index.size) - position
    far = _ReplicaGroup(index, dst_node[index], begins, length, position)
    fan_out = int(length.max(initial=0))
    return _Fixed(src, src_node, dst, source, hop, near, far, near_is_balanced, fan_out)


@lru_cache(maxsize=1 << 12)
def _ranks(several: tuple[range, ...]) -> Ranks:
    """Return each rank of several ranges once, ascending."""
    parts = [np.arange(ranks.start, ranks.stop, ranks.step) for ranks in several]
    return parts[0] if len(parts) == 1 else np.unique(np.concatenate(parts))


def _runs(values: Ranks) -> tuple[Ranks, Ranks]:
    """Count, for each entry of sorted values, the equal entries before it and in all."""
    first = np.searchsorted(values, values, "left")
    length = np.searchsorted(values, values, "right") - first
    return np.arange(values.size) - first, length


def _level(loads: Ranks, extra: int, order: _Order) -> tuple[Ranks, int]:
    """Divide ``extra`` destinations among sources so that the largest load is as small as possible.

    Filling the k smallest loads up to a level L takes k L less their sum, and no other choice of k
    sources takes more. The level is the least one that is enough for some k.

    Returns:
        How many destinations each source takes, and how many sources take one less to match
        ``extra``.
    """
    if not extra:
        return np.zeros_like(loads), 0
    total = extra + np.cumsum(np.sort(loads))
    level = int((-(-total // np.arange(1, loads.size + 1))).min())
    shares = np.maximum(level - loads, 0)
    surplus = int(shares.sum()) - extra
    takers = np.flatnonzero(shares)
    if surplus:
        shares[order.last(takers, surplus)] -= 1
    return shares, surplus
