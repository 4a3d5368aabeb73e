"""Plans hybrid context parallelism: how many ranks share a sequence, and which ones.

A micro-batch of a data-parallel rank has one row on every context-parallel rank. Either all of them
share a row, or several rows are there at once, each on a group of neighbours; groups are nested, so
that 8 ranks are split into 4 + 4, 4 + 2 + 2, 4 + 2 + 1 + 1 and so on. A long sequence is shared by
many ranks. A short one is on a single rank, which exchanges no keys and values and needs no
padding.

The plan is made in four steps. Each sequence gets the smallest group that has room for it, and
where there are few sequences a larger one, lest one rank have all of the work of a long one. Then
sequences are dealt to groups, the longest first, each to the group with the least work; this is
the rule of Graham (1969, "Bounds on multiprocessing timing anomalies"). The sequences of a group
are packed into rows. Finally the rows of nested groups are put into micro-batches, the heaviest
first, so that ranks which wait for each other in a micro-batch have similar work in it.

Pure functions of the lengths, without torch and numpy.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from operator import itemgetter

from mindspeed_rl.core.layout import num_chunks, round_up
from mindspeed_rl.packing.bins import fill_rows, rows_for_ranks
from mindspeed_rl.packing.cost import SequenceCost

# Largest work of a sequence on one rank that a plan allows, as a share of a rank's mean work.
_SHARES = (math.inf, 0.5, 0.25, 0.125, 0.03125)


@dataclass(frozen=True, slots=True)
class SharedRow:
    """A row of a micro-batch and the context-parallel ranks that share it.

    Attributes:
        samples: Positions in the list of samples.
        first: Context-parallel rank of the first of them.
        size: Number of them; they are neighbours.
    """

    samples: tuple[int, ...]
    first: int
    size: int

    @property
    def ranks(self) -> range:
        """The context-parallel ranks that share the row."""
        return range(self.first, self.first + self.size)


MicroBatchRows = tuple[SharedRow, ...]
"""The rows of one micro-batch of a data-parallel rank: together on all context-parallel ranks."""
_Groups = dict[tuple[int, int], list[list[int]]]  # Rows by size and number of group.


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextRules:
    """Rules by which sequences are shared by context-parallel ranks.

    Attributes:
        dp: Data-parallel size.
        sizes: Numbers of ranks that may share a row, each a multiple of the one before, from 1 to
            the context-parallel size.
        tokens: Tokens that a rank has room for: a row of ``s`` ranks has ``s`` times as many.
        cost: Work of a sequence.
        tensor_ranks: Number of ranks that cut the tokens of a rank further: each row is padded to a
            multiple of it and of the chunks of its sequences.
        lockstep: Whether all ranks wait for each other in every micro-batch, as they do for experts
            on other ranks; otherwise only those that share a row wait for each other.
        fewest: Least number of micro-batches.
        multiple: Divisor of the number of micro-batches.
    """

    dp: int
    sizes: tuple[int, ...]
    tokens: int
    cost: SequenceCost
    tensor_ranks: int = 1
    lockstep: bool = False
    fewest: int = 1
    multiple: int = 1

    @property
    def cp(self) -> int:
        """The context-parallel size."""
        return self.sizes[-1]

    def plans(self, lengths: Sequence[int]) -> Iterable[list[list[MicroBatchRows]]]:
        """Yield plans from the fewest shared sequences to the most: [dp][micro-batch]. Pure."""
        mean = sum(map(self.cost.of, lengths)) / (self.dp * self.cp)
        before = None
        for share in _SHARES:
            sizes = [self.group_size(n, share * mean) for n in lengths]
            if sizes != before:
                yield self._arrange(lengths, self._pack(lengths, self._deal(lengths, sizes)))
            before = sizes

    def group_size(self, length: int, most: float) -> int:
        """Return the smallest number of ranks that has room for a sequence.

        Args:
            length: Tokens of the sequence.
            most: Largest work of each of the ranks, unless all of them share the sequence.
        """
        for size in self.sizes:
            fits = round_up(length, num_chunks(size)) <= size * self.tokens
            if fits and self.cost.share(length, size) <= most:
                return size
        return self.cp

    def finish(self, plan: Sequence[Sequence[MicroBatchRows]], lengths: Sequence[int]) -> float:
        """Return when the last rank has done its work, if ranks wait only where they must. Pure.

        Args:
            plan: [dp][micro-batch], equally many of them.
            lengths: Tokens of each sample.
        """
        clocks = [[0.0] * self.cp for _ in range(self.dp)]
        for micro_batches in zip(*plan, strict=True):
            for clock, rows in zip(clocks, micro_batches, strict=True):
                for row in rows:
                    begin = max(clock[rank] for rank in row.ranks)
                    end = begin + self.work(row.samples, row.size, lengths)
                    clock[row.first : row.first + row.size] = [end] * row.size
            if self.lockstep:
                latest = max(map(max, clocks))
                clocks = [[latest] * self.cp for _ in range(self.dp)]
        return max(map(max, clocks))

    def row_length(self, samples: Iterable[int], size: int, lengths: Sequence[int]) -> int:
        """Return the tokens of a row that ``size`` ranks share, padding included."""
        chunks = num_chunks(size)
        tokens = sum(round_up(lengths[i], chunks) for i in samples)
        return round_up(max(1, tokens), chunks * self.tensor_ranks)

    def work(self, samples: Sequence[int], size: int, lengths: Sequence[int]) -> float:
        """Return the work of each of the ranks that share a row; padding has some, too."""
        padded = [round_up(lengths[i], num_chunks(size)) for i in samples]
        padding = self.row_length(samples, size, lengths) - sum(padded)
        return sum(self.cost.share(n, size) for n in padded) + self.cost.linear * padding / size

    def _deal(
        self, lengths: Sequence[int], sizes: Sequence[int]
    ) -> dict[tuple[int, int], list[int]]:
        """Deal sequences to groups of ranks, the longest first, each to the one with least work."""
        dealt: dict[tuple[int, int], list[int]] = {}
        load = [0.0] * (self.dp * self.cp)
        for size in reversed(self.sizes):
            groups = [(max(load[at : at + size]), at) for at in range(0, len(load), size)]
            heapq.heapify(groups)
            mine = [i for i, own in enumerate(sizes) if own == size]
            for i in sorted(mine, key=lambda i: (-lengths[i], i)):
                _, at = groups[0]
                dealt.setdefault((size, at // size), []).append(i)
                work = self.cost.share(round_up(lengths[i], num_chunks(size)), size)
                load[at : at + size] = [before + work for before in load[at : at + size]]
                heapq.heapreplace(groups, (max(load[at : at + size]), at))
        return dealt

    def _pack(self, lengths: Sequence[int], dealt: dict[tuple[int, int], list[int]]) -> _Groups:
        """Pack the sequences of each group into rows; single ranks fill all micro-batches."""
        packed = {}
        for (size, group), samples in dealt.items():
            padded = [round_up(lengths[i], num_chunks(size)) for i in samples]
            rows = fill_rows(padded, max(size * self.tokens, *padded))
            packed[size, group] = [[samples[j] for j in row] for row in rows]

        def count(rank: int) -> int:
            return sum(len(packed.get((size, rank // size), ())) for size in self.sizes)

        counts = [count(rank) for rank in range(self.dp * self.cp)]
        total = round_up(max(self.fewest, *counts), self.multiple)
        for rank, own in enumerate(counts):
            samples = dealt.get((1, rank), [])
            room = total - own + len(packed.get((1, rank), ()))
            if samples and room > 1:
                rows = rows_for_ranks([lengths[i] for i in samples], self.tokens, 1, room)
                packed[1, rank] = [[samples[j] for j in row] for row in rows if row]
        return packed

    def _arrange(self, lengths: Sequence[int], packed: _Groups) -> list[list[MicroBatchRows]]:
        """Put the rows into micro-batches, equally many on each data-parallel rank."""
        work = partial(self.work, lengths=lengths)
        ranked = [_slots(packed, self.sizes, dp, dp * self.cp, work) for dp in range(self.dp)]
        longest = max(map(len, ranked))
        total = round_up(max(1, self.fewest, longest), self.multiple)
        return [
            [_completed(rows, self.cp) for _, rows in slots]
            + [_completed((), self.cp)] * (total - len(slots))
            for slots in ranked
        ]


_Slot = tuple[float, tuple[SharedRow, ...]]  # The work of the busiest rank, and the rows.
_busiest = itemgetter(0)


def _slots(
    packed: _Groups,
    sizes: Sequence[int],
    group: int,
    origin: int,
    work: Callable[[Sequence[int], int], float],
) -> list[_Slot]:
    """Return the micro-batches of a group of ranks, the one with the most work first.

    Each has a row that the whole group shares, or a micro-batch of each of the groups inside it.

    Args:
        packed: Rows of each group.
        sizes: Sizes of groups, up to that of this group.
        group: Number of the group among all of its size.
        origin: Number of the first rank of its data-parallel rank.
        work: Work of a row on each rank.
    """
    size = sizes[-1]
    rows = packed.get((size, group), ())
    found: list[_Slot] = [
        (work(row, size), (SharedRow(tuple(row), group * size - origin, size),)) for row in rows
    ]
    if len(sizes) > 1:
        parts = size // sizes[-2]
        inner = [
            _slots(packed, sizes[:-1], group * parts + part, origin, work) for part in range(parts)
        ]
        for slots in zip_longest(*inner, fillvalue=(0.0, ())):
            joined = tuple(row for _, rows_of_part in slots for row in rows_of_part)
            found.append((max(map(_busiest, slots)), joined))
    return sorted(found, key=_busiest, reverse=True)


def _completed(rows: Sequence[SharedRow], cp: int) -> MicroBatchRows:
    """Give ranks without a row an empty one, and order rows by rank."""
    busy = {rank for row in rows for rank in row.ranks}
    empty = [SharedRow((), rank, 1) for rank in range(cp) if rank not in busy]
    return tuple(sorted([*rows, *empty], key=lambda row: row.first))
