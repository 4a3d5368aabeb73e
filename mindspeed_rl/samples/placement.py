"""Placement: which data-parallel rank trains on which sample, in which micro-batch.

Three decisions, in order: rows that are full, ranks that have equal work, and, among equally good
placements, the one that moves the fewest bytes. All are pure functions of the sample table: every
rank computes the same placement by itself.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import itemgetter

import numpy as np

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.layout import round_up
from mindspeed_rl.core.types import TrainSample
from mindspeed_rl.samples.exchange import Ints
from mindspeed_rl.samples.packing import MicroBatch, pack

# Maximum number of steps of the search for the shortest row length into which everything fits.
_ROW_SEARCH_STEPS = 10
# With more parts, each stays on the rank that packing dealt it to: the search takes time of the
# third power, and the difference between ranks is too small to be worth it.
_MOST_PARTS = 256

Assignment = tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True, slots=True)
class SequenceCost:
    """Work of one sequence of n tokens: ``linear n + quadratic n^2``, in FLOPs or any unit.

    Attributes:
        linear: Work per token.
        quadratic: Work of attention, per squared token.
    """

    linear: float = 1.0
    quadratic: float = 0.0

    def of(self, length: int) -> float:
        """Return the work of one sequence of ``length`` tokens."""
        return length * (self.linear + self.quadratic * length)


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """The samples of each micro-batch on each data-parallel rank.

    The same plan serves the reference, old-policy and update passes. Every rank has the same number
    of micro-batches, of the same padded length.

    Attributes:
        assignment: [dp][micro-batch] -> positions in the list of samples.
        padded_length: T of every micro-batch, in tokens.
    """

    assignment: Assignment
    padded_length: int

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of each data-parallel rank."""
        return len(self.assignment[0])


@dataclass(frozen=True, slots=True)
class BatchRules:
    """Rules by which samples are cut into micro-batches and dealt to the data-parallel ranks.

    Attributes:
        dp: Data-parallel size.
        dp_rank: Data-parallel rank of this process.
        micro_batch_size: Sequences per micro-batch, used when ``max_tokens`` is 0.
        max_tokens: Tokens per micro-batch.
        row_multiple: T, the length of a row, is rounded up to a multiple of this.
        sequence_multiple: Each sequence is padded to a multiple of this, the number of chunks that
            context parallelism cuts it into.
        count_multiple: The number of micro-batches is rounded up to a multiple of this, with empty
            ones.
        cost: Work of a sequence; all ranks get equal amounts of work.
    """

    dp: int
    dp_rank: int
    micro_batch_size: int
    max_tokens: int = 0
    row_multiple: int = 1
    sequence_multiple: int = 1
    count_multiple: int = 1
    cost: SequenceCost = field(default_factory=SequenceCost)

    def plan(self, lengths: Sequence[int], moved: Ints | None = None) -> MicroBatchPlan:
        """Decide which rank trains on what in one optimizer step, the same on all ranks. Pure.

        Args:
            lengths: Tokens of each sample.
            moved: [samples, data-parallel ranks] bytes, or any unit, that move if a sample trains
                there; samples stay where they are as far as balance allows.

        Raises:
            UsageError: A sample is longer than ``max_tokens``.
        """
        if self.max_tokens and max(lengths, default=0) > self.max_tokens:
            raise UsageError(
                f"--max-tokens-per-micro-batch {self.max_tokens} is smaller than a sample of "
                f"{max(lengths)} tokens; raise it to at least the longest sequence"
            )
        lengths = [round_up(length, self.sequence_multiple) for length in lengths]
        work, multiple = [self.cost.of(n) for n in lengths], self.dp * self.count_multiple
        if self.max_tokens:
            # A sample that is longer than the limit with its padding has a row of its own.
            capacity = max(self.max_tokens, max(lengths, default=0))
            rows = rows_for_ranks(lengths, capacity, multiple)
        else:
            count = max(1, -(-len(work) // self.micro_batch_size))
            rows = partition(work, round_up(count, multiple))
        longest = max((sum(lengths[i] for i in row) for row in rows), default=1)
        of_rank = partition([sum(work[i] for i in row) for row in rows], self.dp)
        plan = MicroBatchPlan(
            tuple(tuple(tuple(rows[r]) for r in mine) for mine in of_rank),
            round_up(max(1, longest), self.row_multiple),
        )
        if moved is None:
            return plan
        return minimize_moves(plan, lengths, moved)

    def mine(self, plan: MicroBatchPlan) -> list[int]:
        """Return positions of this rank's samples, in the order of its micro-batches."""
        return [i for micro in plan.assignment[self.dp_rank] for i in micro]

    def pack(self, plan: MicroBatchPlan, samples: Mapping[int, TrainSample]) -> list[MicroBatch]:
        """Pack the micro-batches of this rank. Local.

        Args:
            plan: Plan of one optimizer step.
            samples: Samples by position in the plan; at least those of this rank.
        """
        return [
            pack([samples[i] for i in micro], plan.padded_length, self.sequence_multiple)
            for micro in plan.assignment[self.dp_rank]
        ]

    def pack_own(
        self, samples: Sequence[TrainSample], lengths: Sequence[int] | None = None
    ) -> list[MicroBatch]:
        """Pack this rank's micro-batches of samples that all ranks have in the same order. Local.

        Where ``lengths`` (tokens of each sample) are given, only the samples of this rank are read.
        """
        plan = self.plan([s.length for s in samples] if lengths is None else lengths)
        return self.pack(plan, {i: samples[i] for i in self.mine(plan)})


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


def rows_for_ranks(lengths: Sequence[int], max_tokens: int, multiple: int) -> list[list[int]]:
    """Make rows of at most ``max_tokens`` tokens, in a number that ranks can divide equally.

    Packing all sequences of a step at once and dealing rows to ranks afterwards wastes less than
    packing on every rank. All rows are padded to the longest one, so a number of rows that must be
    rounded up anyway is used to shorten it.

    Args:
        lengths: Tokens of each sequence, none above ``max_tokens``.
        max_tokens: Tokens of a row.
        multiple: Divisor of the number of rows.

    Returns:
        Indices of each row; empty rows at the end.
    """
    best = fill_rows(lengths, max_tokens)
    count = max(1, -(-len(best) // multiple)) * multiple
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


def minimize_moves(plan: MicroBatchPlan, lengths: Sequence[int], moved: Ints) -> MicroBatchPlan:
    """Place samples on ranks that have them, as far as balance leaves a choice. Pure.

    Up to 256 ranks the result is the best that the two changes can reach where no sample is on
    several data-parallel ranks; it is never worse than ``plan``.

    Args:
        plan: Plan of one optimizer step.
        lengths: Length that each sample was placed by; samples of equal length are exchangeable.
        moved: [samples, data-parallel ranks] bytes that move if it trains there, or any unit.
    """
    saved = moved.max(1, keepdims=True) - moved
    if len(plan.assignment) == 1 or not saved.any():
        return plan
    classes = np.unique(np.asarray(lengths, dtype=np.int64), return_inverse=True)[1].reshape(-1)
    savings = _savings(classes, saved)
    parts = plan.assignment
    if len(parts) <= _MOST_PARTS:
        gain = _reachable(savings, _counts(parts, classes))
        parts = tuple(parts[number] for number in best_assignment(gain))
    parts = _swap_equals(parts, classes, savings)
    if bytes_moved(parts, moved) >= bytes_moved(plan.assignment, moved):
        return plan
    return replace(plan, assignment=parts)


def bytes_moved(assignment: Assignment, moved: Ints) -> int:
    """Return what moves for all samples, in the unit of ``moved``. Pure."""
    return sum(int(moved[_items(rows), dp].sum()) for dp, rows in enumerate(assignment))


def _items(rows: Iterable[Sequence[int]]) -> list[int]:
    return [i for row in rows for i in row]


@dataclass(frozen=True, slots=True)
class _Savings:
    """Pairs of a sample and a rank on which it saves something: arrays of equal length.

    Attributes:
        items: Positions of the samples.
        ranks: Data-parallel rank on which each saves.
        saved: Amount saved.
        classes: Class of the sample's length.
        places: Number of samples of the same class that save more on the same rank.
    """

    items: Ints
    ranks: Ints
    saved: Ints
    classes: Ints
    places: Ints


def _savings(classes: Ints, saved: Ints) -> _Savings:
    """List savings by rank, then by class, the greatest first."""
    items, ranks = np.nonzero(saved)
    value = saved[items, ranks]
    order = np.lexsort((items, -value, classes[items], ranks))
    items, ranks, value = items[order], ranks[order], value[order]
    kind = classes[items]
    number = np.arange(len(items))
    begins = np.ones(len(items), dtype=bool)
    begins[1:] = (kind[1:] != kind[:-1]) | (ranks[1:] != ranks[:-1])
    return _Savings(
        items, ranks, value, kind, number - np.maximum.accumulate(np.where(begins, number, 0))
    )


def _counts(assignment: Assignment, classes: Ints) -> Ints:
    """Count the samples of each class in each part: [parts, classes]."""
    size = int(classes.max()) + 1
    return np.stack([np.bincount(classes[_items(rows)], minlength=size) for rows in assignment])


def _reachable(savings: _Savings, counts: Ints) -> Ints:
    """Return the savings if a part goes to a rank and takes the best equals: [parts, ranks]."""
    taken = np.where(counts[:, savings.classes] > savings.places, savings.saved, 0)
    sums = np.cumsum(np.hstack([np.zeros_like(taken[:, :1]), taken]), axis=1)
    borders = np.searchsorted(savings.ranks, np.arange(len(counts) + 1))
    return np.diff(sums[:, borders], axis=1)


def _swap_equals(assignment: Assignment, classes: Ints, savings: _Savings) -> Assignment:
    """Swap samples of equal length to the ranks where they save most, the best ones first."""
    left = _counts(assignment, classes)
    places = savings.ranks * left.shape[1] + savings.classes
    filled = np.flatnonzero(left)
    room = dict(zip(filled.tolist(), left.reshape(-1)[filled].tolist(), strict=True))
    order = np.lexsort((savings.ranks, savings.items, -savings.saved))
    chosen: dict[int, int] = {}
    for i, place in zip(savings.items[order].tolist(), places[order].tolist(), strict=True):
        if i not in chosen and room.get(place):
            room[place] -= 1
            chosen[i] = place
    at = np.full(len(classes), -1)
    taken = np.fromiter(chosen.values(), dtype=np.int64)
    at[list(chosen)] = taken // left.shape[1]
    np.subtract.at(left.reshape(-1), taken, 1)
    # The remaining samples fill the remaining places, class by class and rank by rank.
    rest = np.flatnonzero(at < 0)
    rest = rest[np.argsort(classes[rest], kind="stable")]
    ranks = np.broadcast_to(np.arange(len(left)), left.T.shape)
    at[rest] = np.repeat(ranks, left.T.reshape(-1))
    return _refilled(assignment, classes, at)


def _refilled(assignment: Assignment, classes: Ints, at: Ints) -> Assignment:
    """Fill the rows with other samples of the same lengths, each on the rank that ``at`` names."""
    before = np.array([i for rows in assignment for i in _items(rows)], dtype=np.int64)
    rank = np.repeat(np.arange(len(assignment)), [len(_items(rows)) for rows in assignment])
    items = np.empty_like(before)
    items[np.lexsort((rank, classes[before]))] = np.lexsort((at, classes))
    given = iter(items.tolist())
    return tuple(
        tuple(tuple(sorted(islice(given, len(row)))) for row in rows) for rows in assignment
    )


def best_assignment(gain: Ints) -> list[int]:
    """Choose the row of each column so that the sum of ``gain`` [n, n] is largest.

    The Hungarian method with shortest augmenting paths (Jonker and Volgenant 1987), O(n^3).
    """
    cost = gain.max() - gain.T  # The rows of ``cost`` are the columns of ``gain``.
    size = len(cost)
    none, far = -1, np.iinfo(np.int64).max // 4
    row_price, column_price = np.zeros(size, np.int64), np.zeros(size, np.int64)
    owner = np.full(size, none)  # The row that owns each column.
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
        while column != none:  # Shift the ownership of columns along the path that was found.
            previous = int(before[column])
            owner[column] = owner[previous] if previous != none else start
            column = previous
    found = np.empty(size, dtype=np.int64)
    found[owner] = np.arange(size)
    return [int(c) for c in found]
