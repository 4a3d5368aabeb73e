"""Plans micro-batches: which sequences make a row, and which data-parallel rank has which row.

Pure functions of the lengths, without torch and numpy: a run and its dry run plan by the same code.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from mindspeed_rl.config import TrainConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.layout import ParallelLayout, round_up

# Maximum number of steps of the search for the shortest row length into which everything fits.
_ROW_SEARCH_STEPS = 10

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
    of micro-batches; each has its own length.

    Attributes:
        assignment: [dp][micro-batch] -> positions in the list of samples.
        row_lengths: [dp][micro-batch] -> T, the tokens that travel, padding included.
    """

    assignment: Assignment
    row_lengths: tuple[tuple[int, ...], ...]

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of each data-parallel rank."""
        return len(self.assignment[0])

    @property
    def num_tokens(self) -> int:
        """Tokens that travel on all data-parallel ranks together, padding included."""
        return sum(map(sum, self.row_lengths))


def real_share(plans: Sequence[MicroBatchPlan], lengths: Sequence[int]) -> float:
    """Return the tokens of all samples per token that travels, over all ranks. Pure.

    Args:
        plans: Plans of the optimizer steps that the samples make.
        lengths: Tokens of each sample.
    """
    return sum(lengths) / max(1, sum(plan.num_tokens for plan in plans))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingRules:
    """Rules by which samples are cut into micro-batches and dealt to the data-parallel ranks.

    Attributes:
        dp: Data-parallel size.
        micro_batch_size: Sequences per micro-batch where ``max_tokens`` is 0.
        max_tokens: Tokens per micro-batch; 0: ``micro_batch_size`` sequences each; ``None``: as
            many tokens as ``micro_batch_size`` of the longest sequences of the step have.
        row_multiple: T, the length of a row, is rounded up to a multiple of this.
        sequence_multiple: Each sequence is padded to a multiple of this, the number of chunks that
            context parallelism cuts it into.
        count_multiple: The number of micro-batches is rounded up to a multiple of this, with empty
            ones.
        fewest: A rank has at least so many micro-batches, empty ones included, where it has so
            many samples: with fewer than there are pipeline stages, stages idle.
        equal_lengths: Whether all rows of an optimizer step are padded to the longest.
        cost: Work of a sequence; all ranks get equal amounts of work.
    """

    dp: int
    micro_batch_size: int
    max_tokens: int | None = 0
    row_multiple: int = 1
    sequence_multiple: int = 1
    count_multiple: int = 1
    fewest: int = 1
    equal_lengths: bool = False
    cost: SequenceCost = field(default_factory=SequenceCost)

    def assign(self, lengths: Sequence[int]) -> MicroBatchPlan:
        """Decide what trains together in one optimizer step, the same on all ranks. Pure.

        Args:
            lengths: Tokens of each sample.

        Raises:
            UsageError: A sample is longer than ``max_tokens``.
        """
        if self.max_tokens and max(lengths, default=0) > self.max_tokens:
            raise UsageError(
                f"--max-tokens-per-micro-batch {self.max_tokens} is smaller than a sample of "
                f"{max(lengths)} tokens; raise it to at least the longest sequence"
            )
        lengths = self.padded(lengths)
        work, multiple = [self.cost.of(n) for n in lengths], self.dp * self.count_multiple
        if self.max_tokens == 0:
            count = max(1, -(-len(work) // self.micro_batch_size))
            rows = partition(work, round_up(count, multiple))
        else:
            longest = max(lengths, default=0)
            # A sample that is longer than the limit with its padding has a row of its own.
            limit = self.max_tokens or self.micro_batch_size * longest
            fewest = self.dp * min(self.fewest, len(lengths) // self.dp)
            rows = rows_for_ranks(lengths, max(limit, longest), multiple, fewest)
        of_rank = partition([sum(work[i] for i in row) for row in rows], self.dp)
        assignment = tuple(tuple(tuple(rows[r]) for r in mine) for mine in of_rank)
        return MicroBatchPlan(assignment, self._row_lengths(assignment, lengths))

    def padded(self, lengths: Sequence[int]) -> list[int]:
        """Return the tokens of each sample with the padding behind it."""
        return [round_up(length, self.sequence_multiple) for length in lengths]

    def _row_lengths(
        self, assignment: Assignment, lengths: Sequence[int]
    ) -> tuple[tuple[int, ...], ...]:
        found = tuple(
            tuple(round_up(max(1, sum(lengths[i] for i in row)), self.row_multiple) for row in rows)
            for rows in assignment
        )
        if self.equal_lengths:
            longest = max(map(max, found))
            found = tuple(tuple(longest for _ in rows) for rows in found)
        return found


SIGMA = 0.9
"""Spread of the logarithm of drawn lengths."""
_SCALE_STEPS = 30


def drawn_lengths(count: int, mean: float, longest: int, seed: int = 0) -> list[int]:
    """Draw lengths of a log-normal distribution that is cut at ``longest``. Pure.

    Args:
        count: Number of lengths.
        mean: Mean of the lengths after the cut, nearly; at most ``longest``.
        longest: Largest length.
        seed: Seed of the draws.
    """
    generator = random.Random(seed)
    drawn = [generator.lognormvariate(0.0, SIGMA) for _ in range(count)]

    def cut(scale: float) -> list[int]:
        return [max(1, min(longest, round(scale * x))) for x in drawn]

    low, high = 0.0, longest / min(drawn, default=1.0)
    for _ in range(_SCALE_STEPS):
        middle = (low + high) / 2
        if sum(cut(middle)) < mean * count:
            low = middle
        else:
            high = middle
    return cut(high)


@dataclass(frozen=True, slots=True)
class PackingEstimate:
    """How one optimizer step would be packed, with drawn lengths.

    Attributes:
        samples: Number of samples on all ranks.
        mean_length: Mean tokens of a sample.
        num_micro_batches: Micro-batches of each data-parallel rank.
        longest_row: Tokens of the longest micro-batch.
        real_share: Tokens of samples per token that travels.
    """

    samples: int
    mean_length: float
    num_micro_batches: int
    longest_row: int
    real_share: float

    @classmethod
    def of(cls, rules: PackingRules, lengths: Sequence[int]) -> PackingEstimate:
        """Plan an optimizer step of samples with the given lengths, as a run does. Pure."""
        plan = rules.assign(lengths)
        return cls(
            samples=len(lengths),
            mean_length=sum(lengths) / max(1, len(lengths)),
            num_micro_batches=plan.num_micro_batches,
            longest_row=max(map(max, plan.row_lengths)),
            real_share=real_share([plan], lengths),
        )


def packing_rules(
    train: TrainConfig,
    parallel: ParallelLayout,
    longest: int,
    *,
    sequence_parallel: bool,
    equal_lengths: bool = False,
    cost: SequenceCost | None = None,
) -> PackingRules:
    """Return the rules that follow from the flags. Pure.

    Args:
        train: Flags of the micro-batches.
        parallel: Training layout.
        longest: Tokens of the longest sequence that the run allows; 0: not known.
        sequence_parallel: Whether activations are sharded along the sequence.
        equal_lengths: Whether rows need one length, whatever the flags say.
        cost: Work of a sequence; by default its tokens.
    """
    max_tokens = train.max_tokens_per_micro_batch
    if max_tokens is None and longest:
        max_tokens = train.micro_batch_size * round_up(longest, parallel.sequence_multiple)
    return PackingRules(
        dp=parallel.dp,
        micro_batch_size=train.micro_batch_size,
        max_tokens=max_tokens,
        row_multiple=parallel.row_multiple(sequence_parallel=sequence_parallel),
        sequence_multiple=parallel.sequence_multiple,
        count_multiple=parallel.pp if parallel.stages.vpp > 1 else 1,
        fewest=parallel.pp,
        equal_lengths=train.equal_micro_batch_lengths or equal_lengths,
        cost=cost or SequenceCost(),
    )


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
