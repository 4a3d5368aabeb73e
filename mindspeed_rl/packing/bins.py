"""Packs and deals items: into parts of equal cost, and into rows of limited length.

Pure functions of numbers, without torch and numpy.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from operator import itemgetter

from mindspeed_rl.core.layout import round_up

# Maximum number of steps of the search for the shortest row length into which everything fits.
_ROW_SEARCH_STEPS = 10


def partition(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Split items into parts of nearly equal cost; their numbers of items differ by at most one.

    The largest differencing method (Karmarkar and Karp 1982, "The differencing method of set
    partitioning", UCB/CSD 82/113), with parts of equal number (Michiels et al. 2012): items are
    dealt in sorted blocks of ``num_parts``; then the two least even splits are merged repeatedly,
    the heaviest part of one with the lightest of the other.

    Args:
        costs: Cost of each item, not negative.
        num_parts: Number of parts, at least 1.

    Returns:
        [num_parts] lists of indices in ascending order, the parts with more items first; among
        parts of equal number the one with the smallest index first.
    """
    if num_parts == 1:
        return [list(range(len(costs)))]
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    splits: list[_Split] = []
    for start in range(0, len(order), num_parts):
        block = order[start : start + num_parts]
        parts: list[_Part] = [(costs[i], [i]) for i in block]
        parts += [(0.0, []) for _ in range(num_parts - len(block))]
        splits.append(_split(parts, start))
    heapq.heapify(splits)
    while len(splits) > 1:
        first = heapq.heappop(splits)
        if splits[0][0] == 0:  # All other splits are even, too: merging them moves no cost.
            for _, _, parts in sorted(splits):
                for (_, mine), (_, other) in zip(first[2], reversed(parts), strict=True):
                    mine += other
            splits = [first]
            break
        second = heapq.heappop(splits)
        merged = [
            (a + b, _joined(mine, other))
            for (a, mine), (b, other) in zip(first[2], reversed(second[2]), strict=True)
        ]
        merged.sort(key=_cost, reverse=True)
        heapq.heappush(splits, _split(merged, min(first[1], second[1])))
    found = (
        [sorted(items) for _, items in splits[0][2]] if splits else [[] for _ in range(num_parts)]
    )
    return sorted(found, key=lambda items: (-len(items), items))


_Part = tuple[float, list[int]]  # The cost and the items.
_Split = tuple[float, int, list[_Part]]  # The least even sorts first; the number is unique.


def _split(parts: list[_Part], number: int) -> _Split:
    """Make a split of ``parts``, which are sorted by falling cost."""
    return parts[-1][0] - parts[0][0], number, parts


def _joined(some: list[int], more: list[int]) -> list[int]:
    """Join two lists in the longer one; neither list is used again by the caller."""
    if len(some) < len(more):
        some, more = more, some
    some.extend(more)
    return some


_cost = itemgetter(0)


def fill_rows(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put sequences into as few rows as best-fit decreasing finds.

    It needs at most 11/9 of the least number of rows, plus one (Johnson 1974), and much less where
    lengths vary.

    Args:
        lengths: Tokens of each sequence, none above ``capacity``.
        capacity: Tokens of a row.

    Returns:
        Indices of each row in ascending order, rows by their smallest index.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # Pairs of (tokens left, row), sorted.
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect_left(room, (lengths[i], 0))
        if place == len(room):
            rows.append([i])
            insort(room, (capacity - lengths[i], len(rows) - 1))
        else:
            left, row = room.pop(place)
            rows[row].append(i)
            insort(room, (left - lengths[i], row))
    return sorted(sorted(row) for row in rows)


def rows_for_ranks(
    lengths: Sequence[int], max_tokens: int, multiple: int, fewest: int = 1
) -> list[list[int]]:
    """Make rows of at most ``max_tokens`` tokens, in a number that ranks can divide equally.

    Packing all sequences of a step at once and dealing rows to ranks afterwards wastes less than
    packing on every rank. A step takes as long as its longest rows, so a number of rows that must
    be rounded up anyway is used to shorten them.

    Args:
        lengths: Tokens of each sequence, none above ``max_tokens``.
        max_tokens: Tokens of a row.
        multiple: Divisor of the number of rows.
        fewest: Least number of rows.

    Returns:
        Indices of each row; empty rows at the end.
    """
    best = fill_rows(lengths, max_tokens)
    count = round_up(max(1, fewest, len(best)), multiple)
    low = max(max(lengths, default=0), -(-sum(lengths) // count)) - 1  # This length is too short.
    high = max((sum(lengths[i] for i in row) for row in best), default=0)
    for _ in range(_ROW_SEARCH_STEPS):
        if high - low <= 1:
            break
        middle = (low + high) // 2
        rows = fill_rows(lengths, middle)
        if len(rows) <= count:
            best, high = rows, middle
        else:
            low = middle
    return best + [[] for _ in range(count - len(best))]
