"""Which of equally balanced placements moves the fewest bytes.

Pure functions of the sample table: every rank computes the same placement for itself. Two changes
leave every row as long and every rank as busy as before: data-parallel ranks swap all that they
train on, and samples of equal length swap places.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from mindspeed_rl.data.placement import MicroBatchPlan
from mindspeed_rl.data.routes import Ints

Assignment = tuple[tuple[tuple[int, ...], ...], ...]


def keep_near(plan: MicroBatchPlan, lengths: Sequence[int], moved: Ints) -> MicroBatchPlan:
    """The placement with samples on ranks that have them, as far as balance leaves a choice. Pure.

    Optimal among what the two changes can reach where no sample is on several data-parallel ranks;
    never worse than ``plan``.

    Args:
        plan: of one optimizer step.
        lengths: of each sample, as it was placed by; samples of equal length are exchangeable.
        moved: [samples, data-parallel ranks] bytes that move if it trains there, or any unit.
    """
    if len(plan.assignment) == 1 or not len(lengths):
        return plan
    saved = moved.max(1, keepdims=True) - moved
    if not saved.any():
        return plan
    classes = _classes(lengths)
    given = _best_ranks(plan.assignment, _reachable(plan.assignment, classes, saved))
    found = _swap_equals(given, classes, saved)
    if bytes_moved(found, moved) >= bytes_moved(plan.assignment, moved):
        return plan
    return replace(plan, assignment=found)


def bytes_moved(assignment: Assignment, moved: Ints) -> int:
    """Of all samples, in the unit of ``moved``. Pure."""
    return sum(int(moved[_items(rows), dp].sum()) for dp, rows in enumerate(assignment))


def _items(rows: Iterable[Sequence[int]]) -> list[int]:
    return [i for row in rows for i in row]


def _classes(lengths: Sequence[int]) -> Ints:
    """[samples] numbers that are equal where lengths are."""
    return np.unique(np.asarray(lengths, dtype=np.int64), return_inverse=True)[1].reshape(-1)


def _reachable(assignment: Assignment, classes: Ints, saved: Ints) -> Ints:
    """[parts, ranks] what is saved when a part goes to a rank and then takes the best equals."""
    num_classes = int(classes.max()) + 1
    counts = np.stack(
        [np.bincount(classes[_items(rows)], minlength=num_classes) for rows in assignment]
    )
    result = np.zeros((len(assignment), saved.shape[1]), dtype=np.int64)
    order = np.argsort(classes, kind="stable")
    ends = np.cumsum(np.bincount(classes, minlength=num_classes))
    for number, members in enumerate(np.split(order, ends[:-1])):
        best_first = -np.sort(-saved[members], axis=0)
        of_count = np.vstack([np.zeros_like(best_first[:1]), np.cumsum(best_first, axis=0)])
        parts = np.flatnonzero(counts[:, number])
        result[parts] += of_count[counts[parts, number]]
    return result


def _best_ranks(assignment: Assignment, gain: Ints) -> Assignment:
    """The parts dealt to ranks so that ``gain`` [parts, ranks] is largest in all."""
    part_of = best_assignment(gain)
    return tuple(assignment[part] for part in part_of)


def _swap_equals(assignment: Assignment, classes: Ints, saved: Ints) -> Assignment:
    """Samples of equal length on the ranks that save most by them, the greatest savings first."""
    room: dict[tuple[int, int], int] = {}  # (class, rank) -> places
    for dp, rows in enumerate(assignment):
        for i in _items(rows):
            key = (int(classes[i]), dp)
            room[key] = room.get(key, 0) + 1
    items, ranks = np.nonzero(saved)
    order = np.lexsort((ranks, items, -saved[items, ranks]))
    taken: dict[tuple[int, int], list[int]] = {key: [] for key in room}
    placed: set[int] = set()
    for i, dp in zip(items[order].tolist(), ranks[order].tolist(), strict=True):
        key = (int(classes[i]), dp)
        if i not in placed and len(taken.get(key, ())) < room.get(key, 0):
            taken[key].append(i)
            placed.add(i)
    rest: dict[int, list[int]] = {}  # of each class, those that are as well anywhere
    for i in range(len(classes) - 1, -1, -1):
        if i not in placed:
            rest.setdefault(int(classes[i]), []).append(i)
    waiting = {key: sorted(found, reverse=True) for key, found in taken.items()}

    def next_of(number: int, dp: int) -> int:
        return (waiting[number, dp] or rest[number]).pop()

    return tuple(
        tuple(tuple(sorted(next_of(int(classes[i]), dp) for i in row)) for row in rows)
        for dp, rows in enumerate(assignment)
    )


def best_assignment(gain: Ints) -> list[int]:
    """The row of each column so that the sum of ``gain`` [n, n] is largest.

    The Hungarian method with shortest augmenting paths (Jonker and Volgenant 1987), O(n^3).
    """
    cost = gain.max() - gain.T  # rows of it are columns of gain
    size = len(cost)
    none, far = -1, np.iinfo(np.int64).max // 4
    row_price, column_price = np.zeros(size, np.int64), np.zeros(size, np.int64)
    owner = np.full(size, none)  # of each column
    for start in range(size):
        nearest, before = np.full(size, far), np.full(size, none)
        done = np.zeros(size, dtype=bool)
        row, column, reached = start, none, 0
        scanned = [start]
        while True:
            reduced = reached + cost[row] - row_price[row] - column_price
            better = ~done & (reduced < nearest)
            nearest[better] = reduced[better]
            before[better] = column
            column = int(np.where(done, far, nearest).argmin())
            reached = int(nearest[column])
            done[column] = True
            if owner[column] == none:
                break
            row = int(owner[column])
            scanned.append(row)
        row_price[start] += reached
        for other in scanned[1:]:
            at = int(np.flatnonzero(owner == other)[0])
            row_price[other] += reached - nearest[at]
        closer = done & (nearest < reached)
        column_price[closer] -= reached - nearest[closer]
        while column != none:  # the path takes its columns over
            previous = int(before[column])
            owner[column] = owner[previous] if previous != none else start
            column = previous
    found = np.empty(size, dtype=np.int64)
    found[owner] = np.arange(size)
    return [int(c) for c in found]
