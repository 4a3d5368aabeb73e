"""The assignment of samples to micro-batches and data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.layout import round_up
from mindspeed_rl.samples.balance import SequenceCost, partition, rows_for_ranks


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """The samples of each micro-batch on each data-parallel rank.

    The same plan serves the reference, old-policy and update passes. Every rank has the same number
    of micro-batches, of the same padded length.

    Attributes:
        assignment: [dp][micro-batch] -> positions in the list of samples.
        padded_length: T of every micro-batch, in tokens.
    """

    assignment: tuple[tuple[tuple[int, ...], ...], ...]
    padded_length: int

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of each data-parallel rank."""
        return len(self.assignment[0])


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    dp: int,
    micro_batch_size: int,
    max_tokens: int,
    multiple: int,
    sequence_multiple: int = 1,
    count_multiple: int = 1,
    cost: SequenceCost | None = None,
) -> MicroBatchPlan:
    """Pack samples into micro-batches and deal them to ranks of equal work. Pure.

    The plan is equal on all ranks and depends on the lengths alone.

    Args:
        lengths: Tokens of each sample.
        dp: Data-parallel size.
        micro_batch_size: Sequences per micro-batch, used when ``max_tokens`` is 0.
        max_tokens: Tokens per micro-batch.
        multiple: T is rounded up to a multiple of this.
        sequence_multiple: Each sample is padded to a multiple of this.
        count_multiple: The number of micro-batches is rounded up to a multiple of this, with empty
            ones.
        cost: Work of a sequence, which ranks get equal amounts of; its tokens when not given.

    Raises:
        UsageError: A sample is longer than ``max_tokens``.
    """
    cost = cost or SequenceCost()
    if max_tokens and max(lengths, default=0) > max_tokens:
        raise UsageError(
            f"--max-tokens-per-micro-batch {max_tokens} is smaller than a sample of "
            f"{max(lengths)} tokens; raise it to at least the longest sequence"
        )
    lengths = [round_up(length, sequence_multiple) for length in lengths]
    work = [cost.of(length) for length in lengths]
    if max_tokens:
        # A sample that is longer than the limit with its padding has a row of its own.
        capacity = max(max_tokens, max(lengths, default=0))
        rows = rows_for_ranks(lengths, capacity, dp * count_multiple)
    else:
        rows = _rows_by_count(work, micro_batch_size, dp * count_multiple)
    longest = max((sum(lengths[i] for i in row) for row in rows), default=1)
    of_rank = partition([sum(work[i] for i in row) for row in rows], dp)
    return MicroBatchPlan(
        tuple(tuple(tuple(rows[r]) for r in mine) for mine in of_rank),
        round_up(max(1, longest), multiple),
    )


def _rows_by_count(work: Sequence[float], size: int, multiple: int) -> list[list[int]]:
    """Make micro-batches of at most ``size`` samples and nearly equal work."""
    count = round_up(max(1, -(-len(work) // size)), multiple)
    return partition(work, count)
