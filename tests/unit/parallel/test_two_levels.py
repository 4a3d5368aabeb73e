"""Two levels give the table and the sum that direct messages give, with few of them; real ranks are
in tests/distributed/test_model_files.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mindspeed_rl.parallel import two_levels
from mindspeed_rl.parallel.two_levels import (
    FROM_RANKS,
    GROUP_RANKS,
    TableMove,
    steps_of,
    sum_in_two_levels,
)

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


class Post:
    """Messages of torch.distributed between threads, each of which is a rank and its own group."""

    isend, irecv = "send", "receive"

    def __init__(self, world: int) -> None:
        self.world = world
        self.sizes: list[int] = []
        self._boxes: dict[tuple[int, int], Queue[torch.Tensor]] = {
            (src, dst): Queue() for src in range(world) for dst in range(world)
        }

    def get_rank(self, group: int) -> int:
        return group

    def get_world_size(self, group: int) -> int:
        return self.world

    def get_global_rank(self, group: int, rank: int) -> int:
        return rank

    def P2POp(self, kind: str, tensor: torch.Tensor, peer: int, group: int) -> Callable[[], None]:
        if kind == "send":
            self.sizes.append(tensor.numel())
            self._boxes[group, peer].put(tensor.clone())
            return lambda: None
        return lambda: self._deliver(tensor, self._boxes[peer, group])

    def _deliver(self, tensor: torch.Tensor, box: Queue[torch.Tensor]) -> None:
        sent = box.get(timeout=20)
        assert sent.shape == tensor.shape
        tensor.copy_(sent)

    def batch_isend_irecv(self, operations: Sequence[Callable[[], None]]) -> list[Any]:
        return [SimpleNamespace(wait=operation) for operation in operations]


# one number; fewer numbers than leaders; one that leaders cannot share evenly; none
@pytest.mark.parametrize("shape", [(1,), (2,), (7, 3), (0,)])
@pytest.mark.parametrize(("world", "group_ranks"), SIZES)
def test_every_rank_ends_with_the_sum(
    world: int, group_ranks: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the definition, to the bit, where numbers wrap around."""
    post = Post(world)
    monkeypatch.setattr(two_levels, "dist", post)
    draw = torch.Generator().manual_seed(world)
    parts = torch.randint(-(2**31), 2**31 - 1, (world, *shape), generator=draw, dtype=torch.int32)
    kept = parts.clone()

    def work(rank: int) -> torch.Tensor:
        return sum_in_two_levels(parts[rank], cast(Any, rank), group_ranks)

    with ThreadPoolExecutor(world) as pool:
        for total in pool.map(work, range(world)):
            assert total.dtype is torch.int32
            assert torch.equal(total, parts.sum(0, dtype=torch.int32))
    assert torch.equal(parts, kept), "the given tensors stay"
    leaders = -(-world // group_ranks)
    if parts[0].numel() >= leaders:
        assert len(post.sizes) == 2 * (world - leaders) + 2 * leaders * (leaders - 1)
    assert sum(post.sizes) == 2 * (world - 1) * parts[0].numel()
