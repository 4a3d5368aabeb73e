"""Ranks that are threads: sums over them, for code that is given its reduction."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
Reduce = Callable[[torch.Tensor], torch.Tensor]


def on_ranks(num_ranks: int, work: Callable[[int, Reduce], T]) -> list[T]:
    """``work(rank, reduce)`` on all ranks at once; a rank that reduces alone times out."""
    barrier = threading.Barrier(num_ranks, timeout=20)
    slots: list[torch.Tensor] = [torch.zeros(0)] * num_ranks

    def run(rank: int) -> T:
        def reduce(values: torch.Tensor) -> torch.Tensor:
            slots[rank] = values.clone()
            barrier.wait()
            total = torch.stack(slots).sum(0)
            barrier.wait()
            return total

        return work(rank, reduce)

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))
