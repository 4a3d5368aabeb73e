"""What engines that hold conversations tell each other between two turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Continuation:
    """A sample whose next turn is to be generated.

    Attributes:
        sample_id: position in the step.
        max_tokens: limit of the turn.
        token_ids: all that the model reads.
    """

    sample_id: int
    max_tokens: int
    token_ids: tuple[int, ...]


def exchange_continuations(mine: Sequence[Continuation]) -> list[Continuation]:
    """Those of all ranks on every rank, by sample id. Collective: the world."""
    packed: list[int] = []
    for c in mine:
        packed += (c.sample_id, c.max_tokens, len(c.token_ids), *c.token_ids)
    found = []
    for integers in _all_gather(torch.tensor(packed, dtype=torch.int64)):
        values, at = integers.tolist(), 0
        while at < len(values):
            sample_id, max_tokens, length = values[at : at + 3]
            end = at + 3 + length
            found.append(Continuation(sample_id, max_tokens, tuple(values[at + 3 : end])))
            at = end
    return sorted(found, key=lambda c: c.sample_id)


def _all_gather(mine: torch.Tensor) -> list[torch.Tensor]:
    """The int64 tensor of every rank, of any length, in rank order: two collectives."""
    world = dist.get_world_size()
    size = torch.tensor([mine.numel()])
    sizes = [torch.empty_like(size) for _ in range(world)]
    dist.all_gather(sizes, size)
    longest = int(torch.stack(sizes).max())
    padded = torch.zeros(longest, dtype=torch.int64)
    padded[: mine.numel()] = mine
    parts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded)
    return [part[: int(n)] for part, n in zip(parts, sizes, strict=True)]
