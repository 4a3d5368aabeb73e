"""Who serves whom: the choice of a source for every destination of a rectangle.

Pure arithmetic on the ranks that hold a rectangle and the ranks that need it. Every rank evaluates
the whole (small) assignment of the rectangles that concern it, so the sender's view is the inverse
of the receiver's by construction; it never looks at another rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Ranks = NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class Assignment:
    """The sources of one rectangle.

    Attributes:
        destinations: [D] ranks that need it, ascending.
        source: [D] who serves each; itself where it holds the rectangle.
        leg: [D] 0 where nothing travels, 1 where a holder sends, 2 where a destination on the same
            node passes on what it received in leg 1.
        most_sent: the largest number of destinations that one rank serves in leg 1.
        fan_out: the largest number of destinations on a node without a holder.
        even: all such nodes have equally many.
        level: no other turn gives any source another load.
    """

    destinations: Ranks
    source: Ranks
    leg: NDArray[np.int8]
    most_sent: int
    fan_out: int
    even: bool
    level: bool

    def served_by(self, rank: int) -> list[tuple[int, int]]:
        """(destination, leg) of everything that ``rank`` sends, ascending."""
        found = np.flatnonzero((self.source == rank) & (self.leg > 0))
        return [(int(self.destinations[i]), int(self.leg[i])) for i in found]

    def source_of(self, rank: int) -> tuple[int, int]:
        """(source, leg) of a destination."""
        i = int(np.searchsorted(self.destinations, rank))
        return int(self.source[i]), int(self.leg[i])


def assign_sources(
    sources: tuple[range, ...],
    destinations: range,
    ranks_per_node: int,
    turn: int = 0,
    relay: bool = False,
) -> Assignment:
    """Choose a source for every destination.

    A destination that holds the rectangle takes its own. Others take a holder of their node, in
    turns. What is left is spread over the holders so that the largest load is as small as it can be
    after the first two rules.

    Args:
        sources: the ranks that hold the rectangle.
        destinations: the ranks that need it.
        ranks_per_node: size of a node.
        turn: rotates every choice between equals; give neighbouring tensors different turns, or
            the first of several holders serves them all.
        relay: let one rank of each node without a holder receive for the others of its node.
    """
    usual = _assign(sources, destinations, ranks_per_node, 0, relay)
    if usual.level:
        return usual
    period = sum(map(len, sources)) * (ranks_per_node if relay else 1)
    return _assign(sources, destinations, ranks_per_node, turn % period, relay)


@lru_cache(maxsize=1 << 16)
def _assign(
    sources: tuple[range, ...], destinations: range, ranks_per_node: int, turn: int, relay: bool
) -> Assignment:
    """:func:`assign_sources`, once for every turn that matters."""
    if len(sources) == len(sources[0]) == len(destinations) == 1:
        return _one_to_one(sources[0][0], destinations[0], ranks_per_node)
    fixed = _fixed(sources, destinations, ranks_per_node)
    src, dst, near, far, leg = fixed.src, fixed.dst, fixed.near, fixed.far, fixed.leg
    source = fixed.source.copy()
    choice = near.first + (near.position + turn) % near.count
    source[near.index] = src[choice]
    entering = far.index
    if relay and far.index.size:
        leaders = far.first + (turn + far.node) % far.count
        passed_on = leaders != np.arange(far.index.size)
        source[far.index[passed_on]] = dst[far.index[leaders[passed_on]]]
        leg = leg.copy()
        leg[far.index[passed_on]] = 2
        entering = far.index[~passed_on]
    loads = np.bincount(choice, minlength=src.size)
    shares, surplus = _level(loads, entering.size, turn)
    source[entering] = np.repeat(src, shares)
    return Assignment(
        dst,
        source,
        leg,
        most_sent=int((loads + shares).max()),
        fan_out=fixed.fan_out,
        even=fixed.even,
        level=not relay and fixed.near_is_level and not surplus,
    )


def _one_to_one(src: int, dst: int, ranks_per_node: int) -> Assignment:
    """What is left of it for whole experts on one rank each, which are most of all tensors."""
    leg = int(src != dst)
    far = src // ranks_per_node != dst // ranks_per_node
    return Assignment(
        np.array([dst]),
        np.array([src]),
        np.array([leg], np.int8),
        most_sent=leg,
        fan_out=int(far),
        even=True,
        level=True,
    )


@dataclass(frozen=True, eq=False, slots=True)
class _Group:
    """Some destinations, and for each the run that its choice rotates in.

    Attributes:
        index: [n] which destinations.
        node: [n] their nodes.
        first: [n] where the run begins: in the sources (near), or in this group (far).
        count: [n] its length.
        position: [n] of the destination among those of its node.
    """

    index: Ranks
    node: Ranks
    first: Ranks
    count: Ranks
    position: Ranks


@dataclass(frozen=True, eq=False, slots=True)
class _Fixed:
    """What no turn changes.

    Attributes:
        src: [S] the sources, ascending.
        dst: [D] the destinations, ascending.
        source: [D] themselves where they are sources, else -1.
        leg: [D] 0 there, else 1.
        near: destinations with a source on their node; runs of sources.
        far: the others; runs of destinations.
        near_is_level: every source of a node serves equally many of it.
        fan_out: as in :class:`Assignment`.
        even: as in :class:`Assignment`.
    """

    src: Ranks
    dst: Ranks
    source: Ranks
    leg: NDArray[np.int8]
    near: _Group
    far: _Group
    near_is_level: bool
    fan_out: int
    even: bool


@lru_cache(maxsize=1 << 14)
def _fixed(sources: tuple[range, ...], destinations: range, ranks_per_node: int) -> _Fixed:
    src = _ranks(sources[0])
    if len(sources) > 1:
        src = np.unique(np.concatenate([_ranks(several) for several in sources]))
    dst = _ranks(destinations)
    found = np.minimum(np.searchsorted(src, dst), src.size - 1)
    source = np.where(src[found] == dst, dst, -1)
    leg = (source < 0).astype(np.int8)
    src_node, dst_node = src // ranks_per_node, dst // ranks_per_node
    first = np.searchsorted(src_node, dst_node, "left")
    count = np.searchsorted(src_node, dst_node, "right") - first
    index = np.flatnonzero((source < 0) & (count > 0))
    position, length = _runs(dst_node[index])
    near = _Group(index, dst_node[index], first[index], count[index], position)
    near_is_level = not (length % near.count).any()
    index = np.flatnonzero((source < 0) & (count == 0))
    position, length = _runs(dst_node[index])
    far = _Group(index, dst_node[index], np.arange(index.size) - position, length, position)
    even = bool((length == length[:1]).all())
    fan_out = int(length.max(initial=0))
    return _Fixed(src, dst, source, leg, near, far, near_is_level, fan_out, even)


def _ranks(several: range) -> Ranks:
    return np.arange(several.start, several.stop, several.step)


def _runs(values: Ranks) -> tuple[Ranks, Ranks]:
    """Of every entry of sorted values: how many equal ones are before it, and how many in all."""
    first = np.searchsorted(values, values, "left")
    length = np.searchsorted(values, values, "right") - first
    return np.arange(values.size) - first, length


def _level(loads: Ranks, extra: int, turn: int) -> tuple[Ranks, int]:
    """How much of ``extra`` each source takes on top of its load so that the largest is least.

    Up to a level L the k smallest loads take k L less their sum, and no choice of sources takes
    more than the best k: the level is the least that is enough for some k.

    Returns:
        The shares, and how many sources take one less than others could.
    """
    if not extra:
        return np.zeros_like(loads), 0
    total = extra + np.cumsum(np.sort(loads))
    level = int((-(-total // np.arange(1, loads.size + 1))).min())
    shares = np.maximum(level - loads, 0)
    surplus = int(shares.sum()) - extra
    takers = np.flatnonzero(shares)
    if surplus:
        spared = takers[(np.arange(surplus) + turn) % takers.size]
        shares[spared] -= 1
    return shares, surplus
