"""Plans micro-batches: which sequences make a row, and which data-parallel rank has which row.

Pure functions of the lengths, without torch and numpy: a run and its dry run plan by the same code.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mindspeed_rl.config import ParallelConfig, TrainConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.layout import ParallelLayout, round_up
from mindspeed_rl.packing.bins import partition, rows_for_ranks
from mindspeed_rl.packing.context_groups import ContextRules, MicroBatchRows, SharedRow
from mindspeed_rl.packing.cost import SequenceCost

Assignment = tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True, slots=True)
class RowPlace:
    """Where a row is computed.

    Attributes:
        micro_batch: Number of the micro-batch.
        first: First of the context-parallel ranks that share the row.
        size: Number of them; they are neighbours.
    """

    micro_batch: int
    first: int
    size: int

    def has(self, cp_rank: int) -> bool:
        """Whether a context-parallel rank shares the row."""
        return self.first <= cp_rank < self.first + self.size


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """The samples of each row on each data-parallel rank.

    The same plan serves the reference, old-policy and update passes. Every rank has the same number
    of micro-batches, and one row in each; rows have their own lengths.

    Attributes:
        assignment: [dp][row] -> positions in the list of samples.
        row_lengths: [dp][row] -> T, the tokens that travel, padding included.
        places: [dp][row] -> the micro-batch and the context-parallel ranks of the row; ``None``:
            each micro-batch is one row, which all context-parallel ranks share.
    """

    assignment: Assignment
    row_lengths: tuple[tuple[int, ...], ...]
    places: tuple[tuple[RowPlace, ...], ...] | None = None

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of each data-parallel rank."""
        if self.places is None:
            return len(self.assignment[0])
        return 1 + max(place.micro_batch for place in self.places[0])

    def rows_of(self, dp_rank: int, cp_rank: int) -> list[int]:
        """Return the numbers of the rows that a rank computes, in the order of micro-batches."""
        if self.places is None:
            return list(range(len(self.assignment[dp_rank])))
        places = self.places[dp_rank]
        mine = [row for row, place in enumerate(places) if place.has(cp_rank)]
        return sorted(mine, key=lambda row: places[row].micro_batch)

    def shared_by(self, dp_rank: int, row: int) -> int | None:
        """Return how many context-parallel ranks share a row; ``None``: all of them."""
        return None if self.places is None else self.places[dp_rank][row].size

    def samples_by_ranks(self) -> dict[int, int]:
        """Count samples by the number of ranks that share them; empty if all ranks always do."""
        found: dict[int, int] = {}
        if self.places is None:
            return found
        for places, rows in zip(self.places, self.assignment, strict=True):
            for place, row in zip(places, rows, strict=True):
                found[place.size] = found.get(place.size, 0) + len(row)
        return dict(sorted(found.items()))

    def tokens_of_rank(self, cp: int) -> int:
        """Return the most tokens of a row on one of ``cp`` context-parallel ranks."""
        return max(
            -(-length // (self.shared_by(dp, row) or cp))
            for dp, lengths in enumerate(self.row_lengths)
            for row, length in enumerate(lengths)
        )

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
        context_sizes: Numbers of context-parallel ranks that may share a row, ascending; several
            make the plan hybrid, see :mod:`~mindspeed_rl.packing.context_groups`.
        lockstep: Whether all ranks wait for each other in every micro-batch.
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
    context_sizes: tuple[int, ...] = (1,)
    lockstep: bool = False

    def assign(self, lengths: Sequence[int]) -> MicroBatchPlan:
        """Decide what trains together in one optimizer step, the same on all ranks. Pure.

        A hybrid plan is taken where by its costs, of padding as well, it ends before the plan in
        which all context-parallel ranks share every row.

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
        static = self._static(lengths)
        if len(self.context_sizes) == 1 or not lengths:
            return static
        return self._hybrid(static, lengths)

    def _static(self, lengths: Sequence[int]) -> MicroBatchPlan:
        """Return the plan in which all context-parallel ranks share every row."""
        lengths = [round_up(length, self.sequence_multiple) for length in lengths]
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
        work_of_row = [sum(work[i] for i in row) for row in rows]
        of_rank = partition(work_of_row, self.dp)
        if self.lockstep:  # rows of similar work at the same time
            of_rank = [sorted(mine, key=lambda r: (-work_of_row[r], r)) for mine in of_rank]
        assignment = tuple(tuple(tuple(rows[r]) for r in mine) for mine in of_rank)
        return MicroBatchPlan(assignment, self._row_lengths(assignment, lengths))

    def _hybrid(self, static: MicroBatchPlan, lengths: Sequence[int]) -> MicroBatchPlan:
        """Return the plan that ends first, of ``static`` and those with rows on fewer ranks."""
        rules = self.context_rules(lengths)
        whole = [[(SharedRow(row, 0, rules.cp),) for row in rows] for rows in static.assignment]
        best, end = static, rules.finish(whole, lengths)
        for rows in rules.plans(lengths):
            if (found := rules.finish(rows, lengths)) < end:
                best, end = self._placed(rows, rules, lengths), found
        return best

    def context_rules(self, lengths: Sequence[int]) -> ContextRules:
        """Return the rules of a hybrid plan for samples with these lengths."""
        limit = self.max_tokens or self.micro_batch_size * max(lengths)
        return ContextRules(
            dp=self.dp,
            sizes=self.context_sizes,
            tokens=-(-limit // self.context_sizes[-1]),
            cost=self.cost,
            tensor_ranks=self.row_multiple // self.sequence_multiple,
            lockstep=self.lockstep,
            fewest=min(self.fewest, max(1, len(lengths) // self.dp)),
            multiple=self.count_multiple,
        )

    def _placed(
        self,
        plan: Sequence[Sequence[MicroBatchRows]],
        rules: ContextRules,
        lengths: Sequence[int],
    ) -> MicroBatchPlan:
        """Return [dp][micro-batch] of shared rows as a plan."""
        rows = [
            [(number, row) for number, micro in enumerate(micros) for row in micro]
            for micros in plan
        ]
        return MicroBatchPlan(
            tuple(tuple(row.samples for _, row in mine) for mine in rows),
            tuple(
                tuple(rules.row_length(row.samples, row.size, lengths) for _, row in mine)
                for mine in rows
            ),
            tuple(
                tuple(RowPlace(number, row.first, row.size) for number, row in mine)
                for mine in rows
            ),
        )

    def exchangeable(self, lengths: Sequence[int]) -> list[int]:
        """Return a number for each sample; samples of one number can change places in a plan."""
        if len(self.context_sizes) > 1:  # each row pads its samples to a multiple of its own
            return list(lengths)
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


def token_limit(train: TrainConfig, parallel: ParallelConfig) -> int | None:
    """Return the tokens of a micro-batch on all its ranks, as the flags say.

    0 packs by number, and ``None`` stands for those of ``--micro-batch-size`` longest sequences.
    """
    if parallel.max_seqlen_per_dp_cp_rank is not None:
        return parallel.max_seqlen_per_dp_cp_rank * parallel.context_parallel_size
    return train.max_tokens_per_micro_batch


def check_hybrid_context(train: TrainConfig, parallel: ParallelConfig, *, gathers: bool) -> None:
    """Check the flags that have to do with rows on several numbers of ranks. Pure.

    Args:
        train: Flags of the micro-batches.
        parallel: Flags of the layout.
        gathers: Whether the dispatcher of experts takes equally many tokens from all ranks.

    Raises:
        UsageError: Flags exclude each other.
    """
    if not parallel.hybrid_context_parallel:
        return
    flag = "--hybrid-context-parallel"
    for other, given in (
        ("--equal-micro-batch-lengths", train.equal_micro_batch_lengths),
        ("--moe-token-dispatcher-type allgather", gathers),
    ):
        if given:
            raise UsageError(
                f"{flag} gives every rank a row of its own length, which {other} forbids; remove "
                "one of them"
            )
    tokens, limit = parallel.max_seqlen_per_dp_cp_rank, train.max_tokens_per_micro_batch
    if tokens is None and limit == 0:
        raise UsageError(
            f"{flag} needs to know how many tokens a rank has room for, and "
            "--max-tokens-per-micro-batch 0 packs by number; remove the latter, or give "
            "--max-seqlen-per-dp-cp-rank"
        )
    if tokens is not None and limit and limit != tokens * parallel.context_parallel_size:
        raise UsageError(
            f"--max-seqlen-per-dp-cp-rank {tokens} x --context-parallel-size "
            f"{parallel.context_parallel_size} is not --max-tokens-per-micro-batch {limit}; give "
            "one of them"
        )


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
        longest_row: Tokens of the longest row.
        tokens_of_rank: Most tokens of a row on one of the context-parallel ranks that share it.
        real_share: Tokens of samples per token that travels.
        samples_by_ranks: Number of samples by the number of context-parallel ranks that share them;
            empty where all ranks share all rows.
    """

    samples: int
    mean_length: float
    num_micro_batches: int
    longest_row: int
    tokens_of_rank: int
    real_share: float
    samples_by_ranks: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, rules: PackingRules, lengths: Sequence[int]) -> PackingEstimate:
        """Plan an optimizer step of samples with the given lengths, as a run does. Pure."""
        plan = rules.assign(lengths)
        return cls(
            samples=len(lengths),
            mean_length=sum(lengths) / max(1, len(lengths)),
            num_micro_batches=plan.num_micro_batches,
            longest_row=max(map(max, plan.row_lengths)),
            tokens_of_rank=plan.tokens_of_rank(rules.context_sizes[-1]),
            real_share=real_share([plan], lengths),
            samples_by_ranks=plan.samples_by_ranks(),
        )


def packing_rules(
    train: TrainConfig,
    parallel: ParallelLayout,
    longest: int,
    *,
    sequence_parallel: bool,
    equal_lengths: bool = False,
    cost: SequenceCost | None = None,
    lockstep: bool = False,
    tokens_per_rank: int | None = None,
) -> PackingRules:
    """Return the rules that follow from the flags. Pure.

    Args:
        train: Flags of the micro-batches.
        parallel: Training layout.
        longest: Tokens of the longest sequence that the run allows; 0: not known.
        sequence_parallel: Whether activations are sharded along the sequence.
        equal_lengths: Whether rows need one length, whatever the flags say.
        cost: Work of a sequence; by default its tokens.
        lockstep: Whether all ranks wait for each other in every micro-batch.
        tokens_per_rank: Tokens that a context-parallel rank has room for in a micro-batch; ``None``
            follows from the flags of the micro-batches.

    Raises:
        UsageError: The longest sequence does not fit all context-parallel ranks together.
    """
    max_tokens = train.max_tokens_per_micro_batch
    if tokens_per_rank is not None:
        max_tokens = tokens_per_rank * parallel.cp
        if longest > max_tokens:
            raise UsageError(
                f"--max-seqlen-per-dp-cp-rank {tokens_per_rank} x --context-parallel-size "
                f"{parallel.cp} = {max_tokens} tokens; the longest sequence of the run has "
                f"{longest}; give at least {-(-longest // parallel.cp)}"
            )
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
        context_sizes=parallel.context_sizes,
        lockstep=lockstep,
    )
