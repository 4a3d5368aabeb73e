"""Rows of a router that a rank counts: over the ranks of an engine every token counts once."""

from __future__ import annotations

from collections import Counter

import pytest

from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.expert_placement.counted_rows import counted_rows

BATCHES = (5, 1, 4)
"""Rows of the data-parallel ranks, which are numbered by rank and row."""


def shares_of(tp: int) -> list[list[tuple[int, int]]]:
    """The rows of each rank with sequence parallelism; the last share is filled up."""
    shares = []
    for rank, batch in enumerate(BATCHES):
        size = -(-batch // tp)
        shares += [[(rank, t * size + row) for row in range(size)] for t in range(tp)]
    return shares


def counted(tp: int, kind: str) -> Counter[tuple[int, int]]:
    """How often each row counts in the second of two engines, filled-up ones included."""
    engine = EngineLayout(2 * tp * len(BATCHES), tp, len(BATCHES), expert_parallel=True)
    shares = shares_of(tp)
    total: Counter[tuple[int, int]] = Counter()
    for position in range(engine.size):
        dp = position // tp
        own = [(dp, row) for row in range(BATCHES[dp])]
        gathered = [(r, row) for r, batch in enumerate(BATCHES) for row in range(batch)]
        seen = {
            "own": own,
            "gathered": gathered,
            "gathered shares": [row for share in shares for row in share],
            "own share": shares[position],
        }[kind]
        sizes = [len(share) for share in shares] if "share" in kind else []
        found = counted_rows(len(seen), BATCHES[dp], BATCHES, sizes, engine, engine.size + position)
        rows = seen[found.first : found.first + found.count]
        batch = own[found.batch_first : found.batch_first + found.count]
        assert rows == batch, "a row that the router sees is taken for another one of the batch"
        total.update(rows)
    return total


@pytest.mark.parametrize("kind", ["own", "gathered", "gathered shares", "own share"])
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_every_row_counts_once_wherever_rows_are_gathered(kind: str, tp: int) -> None:
    expected = {(rank, row): 1 for rank, batch in enumerate(BATCHES) for row in range(batch)}
    assert counted(tp, kind) == expected


def test_one_data_parallel_rank_has_no_numbers_of_others() -> None:
    engine = EngineLayout(4, 2, expert_parallel=True)
    spans = [counted_rows(7, 7, (), (), engine, rank).count for rank in range(4)]
    assert spans == [7, 0, 7, 0]


def test_rows_of_nobody_known_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="sees 9 tokens"):
        counted_rows(9, 5, BATCHES, (), EngineLayout(3, 1, 3, expert_parallel=True), 0)
