"""Which rows that a router sees a rank counts, so that every token of an engine counts once.

This is pure arithmetic. The cases are those of ``RoutedExpertsCapturer.capture`` in vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_rl.core.layout import EngineLayout


@dataclass(frozen=True, slots=True)
class CountedRows:
    """A span of the rows that a router sees, which are rows of this rank's own batch.

    Attributes:
        first: The first row, as the router sees it.
        batch_first: The same row in the batch.
        count: Number of rows; 0: another rank counts them.
    """

    first: int
    batch_first: int
    count: int


def counted_rows(
    seen: int,
    batch: int,
    of_ranks: Sequence[int],
    shares: Sequence[int],
    engine: EngineLayout,
    rank: int,
) -> CountedRows:
    """Return the rows that this rank counts.

    A router sees the rows of its rank, those of all data-parallel ranks, in their order, or, with
    sequence parallelism, the shares of all ranks or only its own. Where the tensor-parallel ranks
    see the same rows, the first of them counts.

    Args:
        seen: Rows that the router sees.
        batch: Rows of this rank's batch, whose tensor-parallel ranks have the same one.
        of_ranks: The same of each data-parallel rank of the engine.
        shares: Rows of each rank of the engine with sequence parallelism, otherwise empty.
        engine: Ranks of the engines.
        rank: This rank of the world.

    Raises:
        RuntimeError: It is not known which of the rows are those of this rank.
    """
    data_rank, tensor_rank = divmod(engine.expert_rank(rank), engine.tp)
    mine = batch if tensor_rank == 0 else 0
    if seen == batch:
        return CountedRows(0, 0, mine)
    if seen == sum(of_ranks):
        return CountedRows(sum(of_ranks[:data_rank]), 0, mine)
    if seen == sum(shares):
        return CountedRows(sum(shares[: data_rank * engine.tp]), 0, mine)
    if seen == -(-batch // engine.tp):
        start = tensor_rank * seen
        return CountedRows(0, start, max(0, min(seen, batch - start)))
    raise RuntimeError(
        f"a router sees {seen} tokens; the data-parallel ranks have {list(of_ranks)}, this one "
        f"{batch}, and with sequence parallelism {list(shares)}"
    )
