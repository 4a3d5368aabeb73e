"""Ranks that are threads: sums over them, for code that is given its reduction."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from mindspeed_rl.algorithms.types import MeanTerm, Term

T = TypeVar("T")
Reduce = Callable[[torch.Tensor], torch.Tensor]


def alone(values: torch.Tensor) -> torch.Tensor:
    """The reduction of a single rank."""
    return values


def means(terms: Mapping[str, Term]) -> dict[str, float]:
    """The reported means of a micro-batch that is the whole step, by name."""
    return {n: float(t.sum / t.weight) for n, t in terms.items() if isinstance(t, MeanTerm)}


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
