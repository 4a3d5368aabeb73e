"""Sums and gathers of ranks that are threads; real ranks are in tests/distributed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch

from mindspeed_rl.parallel import small_collectives

WORLD = 3


class Exchange:
    """What torch.distributed does for ranks that are threads, each of which is its own group."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(WORLD, timeout=20)
        self._sent: list[torch.Tensor] = [torch.zeros(0)] * WORLD

    def get_world_size(self, rank: Any) -> int:
        return WORLD

    def all_to_all_single(self, received: torch.Tensor, rows: torch.Tensor, *, group: int) -> None:
        received.copy_(torch.stack([sent[group] for sent in self._all(rows, group)]))

    def all_gather(self, rows: list[torch.Tensor], mine: torch.Tensor, *, group: int) -> None:
        for row, sent in zip(rows, self._all(mine, group), strict=True):
            row.copy_(sent)

    def _all(self, mine: torch.Tensor, rank: int) -> list[torch.Tensor]:
        self._sent[rank] = mine.clone()
        self._barrier.wait()
        found = list(self._sent)
        self._barrier.wait()
        return found


# one number; fewer numbers than ranks; one that ranks cannot share evenly; none
@pytest.mark.parametrize("shape", [(1,), (2,), (7, 3), (0,)])
@pytest.mark.parametrize("direct_bytes", [2**20, 0], ids=["direct", "in parts"])
def test_sums_and_gathers_are_those_of_the_definition(
    shape: tuple[int, ...], direct_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_collectives, "DIRECT_BYTES", direct_bytes)
    monkeypatch.setattr(small_collectives, "dist", Exchange())
    parts = torch.randint(-(2**31), 2**31 - 1, (WORLD, *shape), dtype=torch.int32)

    def work(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        mine, group = parts[rank].clone(), cast(Any, rank)
        total = small_collectives.all_reduce_sum(mine, group)
        rows = small_collectives.gather_rows(mine, group)
        assert torch.equal(mine, parts[rank]), "the given tensor stays"
        return total, rows

    with ThreadPoolExecutor(WORLD) as pool:
        for total, rows in pool.map(work, range(WORLD)):
            assert torch.equal(total, parts.sum(0, dtype=torch.int32))
            assert torch.equal(rows, parts)


def test_floats_are_refused() -> None:
    """The order of their sum would decide the last bits."""
    with pytest.raises(AssertionError):
        small_collectives.all_reduce_sum(torch.zeros(2))
