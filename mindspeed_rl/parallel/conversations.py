"""Exchanges between engines that hold conversations, from one turn to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mindspeed_rl.parallel.small_collectives import gather_rows


@dataclass(frozen=True, slots=True)
class Continuation:
    """A sample whose next turn is to be generated.

    Attributes:
        sample_id: Position of the sample in the step.
        max_tokens: Largest number of tokens of the turn.
        token_ids: Tokens of the conversation since the beginning of its last turn.
    """

    sample_id: int
    max_tokens: int
    token_ids: tuple[int, ...]


def exchange_continuations(mine: Sequence[Continuation]) -> list[Continuation]:
    """Gather the continuations of all ranks on every rank, by sample id. Collective: the world."""
    packed: list[int] = []
    for c in mine:
        packed += (c.sample_id, c.max_tokens, len(c.token_ids), *c.token_ids)
    found = []
    for integers, _ in all_gather_pairs(torch.tensor(packed, dtype=torch.int64), torch.zeros(0)):
        values, at = integers.tolist(), 0
        while at < len(values):
            sample_id, max_tokens, length = values[at : at + 3]
            end = at + 3 + length
            found.append(Continuation(sample_id, max_tokens, tuple(values[at + 3 : end])))
            at = end
    return sorted(found, key=lambda c: c.sample_id)


def all_gather_pairs(
    integers: torch.Tensor, floats: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Gather the int64 and the fp32 tensor of every rank, in rank order. Collective: the world.

    This takes two collectives; the tensors are on the host and may have any length.
    """
    sizes = gather_rows(torch.tensor([integers.numel(), floats.numel()]))
    borders = [(8 * n, 8 * n + 4 * m) for n, m in sizes.tolist()]
    longest = max(end for _, end in borders)
    mine = torch.zeros(-(-longest // 8) * 8, dtype=torch.uint8)  # rows begin at whole integers
    message = torch.cat([integers.view(torch.uint8), floats.view(torch.uint8)])
    mine[: message.numel()] = message
    return [
        (part[:middle].view(torch.int64), part[middle:end].view(torch.float32))
        for part, (middle, end) in zip(gather_rows(mine), borders, strict=True)
    ]
