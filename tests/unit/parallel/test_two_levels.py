"""Two levels give the table that direct messages give, with few of them; real ranks are in
tests/distributed/test_model_files.py."""

from __future__ import annotations

import pytest

from mindspeed_rl.parallel.two_levels import FROM_RANKS, GROUP_RANKS, TableMove, steps_of

# the world of one, one group, a last group of one, groups of one, many groups
SIZES = [(1, 4), (4, 4), (9, 4), (3, 1), (23, 5)]


@pytest.mark.parametrize(("world", "group_ranks"), SIZES)
def test_every_rank_ends_with_every_row(world: int, group_ranks: int) -> None:
    """A message is made of what its sender has before the step, so rows that it lacks fail."""
    tables = [{rank: f"row {rank}"} for rank in range(world)]
    plans = [steps_of(rank, world, group_ranks) for rank in range(world)]
    for step in range(3):
        sent = {
            (rank, move.peer): {row: tables[rank][row] for row in move.rows}
            for rank in range(world)
            for move in plans[rank][step].sends
        }
        for rank in range(world):
            for move in plans[rank][step].receives:
                rows = sent.pop((move.peer, rank))
                assert rows.keys() == set(move.rows), "both ends expect the same rows"
                tables[rank] |= rows
        assert not sent, "every message is received"
    assert tables == [{rank: f"row {rank}" for rank in range(world)}] * world


def _sent(world: int) -> list[list[TableMove]]:
    ranks = (steps_of(rank, world, GROUP_RANKS) for rank in range(world))
    return [[move for step in steps for move in step.sends] for steps in ranks]


@pytest.mark.parametrize(
    ("world", "messages", "busiest", "rows"),
    [(1024, 2256, 78, 1_048_560), (4096, 12_096, 126, 16_777_152)],
)
def test_the_messages_that_the_pages_tell(
    world: int, messages: int, busiest: int, rows: int
) -> None:
    """Directly it is world x (world - 1) messages of one row."""
    assert world > FROM_RANKS
    sent = _sent(world)
    assert sum(map(len, sent)) == messages
    assert max(map(len, sent)) == busiest
    assert sum(len(move.rows) for several in sent for move in several) == rows
