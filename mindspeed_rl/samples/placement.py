"""Placement: which data-parallel rank trains on which sample, in which micro-batch.

Three decisions, in order: rows that are full, ranks that have equal work, and, among equally good
placements, the one that moves the fewest bytes. All are pure functions of the sample table: every
rank computes the same placement by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from mindspeed_rl.core.layout import num_chunks, round_up
from mindspeed_rl.core.types import TrainSample
from mindspeed_rl.packing.micro_batches import Assignment, MicroBatchPlan, PackingRules
from mindspeed_rl.samples.exchange import Ints
from mindspeed_rl.samples.packing import MicroBatch, pack

# With more parts, each stays on the rank that packing dealt it to: the search takes time of the
# third power, and the difference between ranks is too small to be worth it.
_MOST_PARTS = 256


@dataclass(frozen=True, slots=True)
class BatchRules:
    """The rules of a run's micro-batches, as one data-parallel rank follows them.

    Attributes:
        packing: Rules by which samples become micro-batches.
        dp_rank: Data-parallel rank of this process.
        cp_rank: Context-parallel rank of this process.
    """

    packing: PackingRules
    dp_rank: int
    cp_rank: int = 0

    def plan(self, lengths: Sequence[int], moved: Ints | None = None) -> MicroBatchPlan:
        """Decide which rank trains on what in one optimizer step, the same on all ranks. Pure.

        Args:
            lengths: Tokens of each sample.
            moved: [samples, data-parallel ranks] bytes, or any unit, that move if a sample trains
                there; samples stay where they are as far as balance allows.

        Raises:
            UsageError: A sample is longer than ``max_tokens``.
        """
        plan = self.packing.assign(lengths)
        if moved is None:
            return plan
        return minimize_moves(plan, self.packing.exchangeable(lengths), moved)

    def mine(self, plan: MicroBatchPlan) -> list[int]:
        """Return positions of this rank's samples, in the order of its micro-batches."""
        rows = plan.assignment[self.dp_rank]
        return [i for row in plan.rows_of(self.dp_rank, self.cp_rank) for i in rows[row]]

    def pack(self, plan: MicroBatchPlan, samples: Mapping[int, TrainSample]) -> list[MicroBatch]:
        """Pack the micro-batches of this rank. Local.

        Args:
            plan: Plan of one optimizer step.
            samples: Samples by position in the plan; at least those of this rank.
        """
        dp, found = self.dp_rank, []
        for row in plan.rows_of(dp, self.cp_rank):
            size = plan.shared_by(dp, row)
            multiple = self.packing.sequence_multiple if size is None else num_chunks(size)
            mine = [samples[i] for i in plan.assignment[dp][row]]
            found.append(pack(mine, plan.row_lengths[dp][row], multiple, size))
        return found

    @property
    def bundle(self) -> int:
        """Number of micro-batches that a pass needs so that no pipeline stage idles."""
        return max(self.packing.fewest, self.packing.count_multiple)

    def pack_alone(self, samples: Sequence[TrainSample]) -> list[MicroBatch]:
        """Pack each sample into a row of its own, and add the empty rows that a pass needs. Local.

        Such a row follows from its sample alone: not from what else is there, nor from the rank.
        """
        rules = self.packing
        rows = []
        for sample in samples:
            length = round_up(sample.length, rules.sequence_multiple)
            length = round_up(length, rules.row_multiple)
            rows.append(pack([sample], length, rules.sequence_multiple))
        missing = -len(rows) % rules.count_multiple
        return rows + [pack([], rules.row_multiple) for _ in range(missing)]

    def pack_own(self, samples: Sequence[TrainSample]) -> list[MicroBatch]:
        """Pack this rank's micro-batches of samples that all ranks have in one order. Local."""
        plan = self.plan([s.length for s in samples])
        return self.pack(plan, {i: samples[i] for i in self.mine(plan)})


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
    parts, row_lengths, places = plan.assignment, plan.row_lengths, plan.places
    if len(parts) <= _MOST_PARTS:
        gain = _reachable(savings, _counts(parts, classes))
        order = best_assignment(gain)
        parts = tuple(parts[number] for number in order)
        row_lengths = tuple(row_lengths[number] for number in order)
        places = None if places is None else tuple(places[number] for number in order)
    parts = _swap_equals(parts, classes, savings)
    if bytes_moved(parts, moved) >= bytes_moved(plan.assignment, moved):
        return plan
    return MicroBatchPlan(parts, row_lengths, places)


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
