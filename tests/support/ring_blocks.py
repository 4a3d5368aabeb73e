"""A ring of ranks in one process: what each computes of the keys of each, and no messages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch

from mindspeed_rl.attention.context import ContextGroup
from mindspeed_rl.attention.kernels import KERNELS
from mindspeed_rl.attention.ring import merged
from mindspeed_rl.attention.rows import make_packed_row
from mindspeed_rl.samples.packing import context_index


def ring_attention_of_blocks(
    kernel: str,
    ranks: int,
    lengths: Sequence[int],
    tensors: Sequence[torch.Tensor],
    grad: torch.Tensor,
    scale: float,
    device: torch.device,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The output of the whole row, and the gradients of queries, keys and values."""
    total = tensors[0].size(0)
    places = [context_index(lengths, total, ranks, rank) for rank in range(ranks)]
    output, sums = torch.zeros_like(grad), [torch.zeros_like(x) for x in tensors]
    for rank, mine in enumerate(places):
        context = ContextGroup(ranks, rank, "p2p")
        plans = make_packed_row(lengths, mine, context, KERNELS[kernel]).to(device).blocks
        of_rank = [plans[0 if at == rank else 1 if at < rank else 2] for at in range(ranks)]
        q, over = (x[mine].to(device) for x in (tensors[0], grad))
        keys = [[x[place].to(device) for x in tensors[1:]] for place in places]
        parts = [plan.forward(q, *pair, scale) for plan, pair in zip(of_rank, keys, strict=True)]
        out, lse = reduce(lambda a, b: merged(*a, *b), ((o.float(), s) for o, s in parts))
        output[mine] = out.cpu()
        for plan, pair, place in zip(of_rank, keys, places, strict=True):
            found = plan.backward(over, q, *pair, out, lse, scale)
            for whole, index, part in zip(sums, (mine, place, place), found, strict=True):
                whole[index] += part.cpu()
    return output, sums
