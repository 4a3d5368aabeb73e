"""What ranks that share a row exchange before and after attention, with gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_rl.attention.context import ContextGroup

_FP32 = 4  # bytes


class _GatherTokens(torch.autograd.Function):
    """Tokens of all ranks; the gradients of all ranks are summed, in fp32 at least."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, context: ContextGroup) -> torch.Tensor:
        ctx.context = context
        whole = x.new_empty(context.size * x.size(0), *x.shape[1:])
        dist.all_gather_into_tensor(whole, x.contiguous(), group=context.group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        size, group, grad = ctx.context.size, ctx.context.group, grad.contiguous()
        if grad.element_size() < _FP32:  # the parts travel as they are, and are added up here
            parts = torch.empty_like(grad)
            dist.all_to_all_single(parts, grad, group=group)
            total = parts.view(size, -1, *grad.shape[1:]).sum(0, dtype=torch.float32)
            return total.to(grad.dtype), None
        mine = grad.new_empty(grad.size(0) // size, *grad.shape[1:])
        dist.reduce_scatter_tensor(mine, grad, group=group)
        return mine, None


def gather_keys(
    k: torch.Tensor, v: torch.Tensor, context: ContextGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of all ranks, one rank after the other. Collective: the row's.

    Args:
        k: [T, m, d].
        v: [T, m, dv].
        context: Ranks that share the row.

    Returns:
        [size T, m, d] and [size T, m, dv]; their gradients are summed over the ranks in fp32, and
        those of half precision are rounded once.
    """
    both = torch.cat([k, v], dim=-1)
    whole: torch.Tensor = _GatherTokens.apply(both, context)  # type: ignore[no-untyped-call]
    keys, values = torch.split(whole, [k.size(-1), v.size(-1)], dim=-1)
    return keys, values


class _AllToAll(torch.autograd.Function):
    """Part i of a tensor to rank i of the block, and back for its gradient."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, context: ContextGroup) -> torch.Tensor:
        ctx.context = context
        return _all_to_all(parts, context)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_to_all(grad, ctx.context), None


def _all_to_all(parts: torch.Tensor, context: ContextGroup) -> torch.Tensor:
    """Exchange [block, ...]; ranks of the group outside the block get nothing."""
    sent = parts.contiguous()
    splits = [sent[0].numel() if rank in context.block else 0 for rank in range(context.size)]
    received = torch.empty_like(sent)
    dist.all_to_all_single(received.view(-1), sent.view(-1), splits, splits, group=context.group)
    return received


def tokens_for_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: ContextGroup, order: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give tokens of most heads away for all tokens of some heads. Collective: the row's group.

    Ulysses (Jacobs et al. 2023, arXiv:2309.14509). Key heads are repeated where their number is no
    multiple of the ranks.

    Args:
        q: [T, n, d]; u ranks exchange, and divide n.
        k: [T, m, d].
        v: [T, m, dv].
        context: Ranks that share the row.
        order: [u T] int32, where each token is among those of the block, rank after rank.

    Returns:
        [u T, n / u, d] and keys and values alike, in the given order.
    """
    ranks = context.ulysses
    copies = ranks // math.gcd(ranks, k.size(1))
    if copies > 1:
        k, v = (x.repeat_interleave(copies, dim=1) for x in (k, v))
    parts = torch.cat([x.reshape(x.size(0), ranks, -1) for x in (q, k, v)], dim=-1)
    received: torch.Tensor = _AllToAll.apply(  # type: ignore[no-untyped-call]
        parts.transpose(0, 1), context
    )
    mine = received.flatten(0, 1).index_select(0, order)
    sizes = [x.size(1) // ranks * x.size(2) for x in (q, k, v)]
    found = zip(torch.split(mine, sizes, dim=-1), (q, k, v), strict=True)
    queries, keys, values = (part.reshape(mine.size(0), -1, x.size(2)) for part, x in found)
    return queries, keys, values


def heads_for_tokens(out: torch.Tensor, context: ContextGroup, order: torch.Tensor) -> torch.Tensor:
    """Undo :func:`tokens_for_heads` for the output. Collective: the row's group.

    Args:
        out: [u T, n / u, dv].
        context: Ranks that share the row.
        order: [u T] int32, where each token of the block, rank after rank, is in ``out``.

    Returns:
        [T, n, dv].
    """
    parts = out.index_select(0, order).reshape(context.ulysses, -1, out.size(1) * out.size(2))
    received: torch.Tensor = _AllToAll.apply(parts, context)  # type: ignore[no-untyped-call]
    return received.transpose(0, 1).reshape(received.size(1), -1, out.size(2))
