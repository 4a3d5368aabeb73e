"""Ring attention: keys and values travel from rank to rank, and no rank has them all.

Each rank attends to one rank's keys at a time; outputs are merged by their log-sum-exp. In the
backward pass the gradients of keys and values travel along and end where the keys belong (Liu et
al. 2023, arXiv:2310.01889). The next keys arrive while a rank attends to the present ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_rl.attention.context import ContextGroup
from mindspeed_rl.attention.kernels import AttentionPlan

# Messages between two ranks are told apart by these.
_KEYS, _GRADIENTS = 0, 1


class Travelling:
    """Keys and values, or their gradients, that go around a ring in one message."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, context: ContextGroup, tag: int) -> None:
        self._shapes = k.shape, v.shape
        self._present = torch.cat([k.reshape(-1), v.reshape(-1)])
        self._arriving = torch.empty_like(self._present)
        self._context, self._tag = context, tag
        self._works: list[Any] = []

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What is here, as [T, m, d] and [T, m, dv]."""
        first, second = self._shapes
        k, v = torch.split(self._present, [first.numel(), second.numel()])
        return k.view(first), v.view(second)

    def start(self) -> None:
        """Send what is here to the next rank and let that of the previous one arrive."""
        group = self._context.group
        ends = (
            (dist.isend, self._present, self._context.next),
            (dist.irecv, self._arriving, self._context.previous),
        )
        operations = [
            dist.P2POp(call, tensor, group=group, tag=self._tag, group_peer=peer)
            for call, tensor, peer in ends
        ]
        self._works = dist.batch_isend_irecv(operations)

    def finish(self) -> None:
        """Wait until everything has been sent and has arrived; then that is here."""
        for work in self._works:
            work.wait()
        self._present, self._arriving = self._arriving, self._present

    def add(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Add to what is here."""
        for here, more in zip(self.tensors, (k, v), strict=True):
            here.add_(more)


def merged(
    out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention to the keys of two parts, and its log-sum-exp. Local.

    No step subtracts infinities or takes the logarithm of 0, which devices may answer differently.

    Args:
        out: [T, n, dv] fp32, attention to the keys of one part; overwritten by the result.
        lse: [T, n] fp32, log-sum-exp of its scores; -inf: it has no keys.
        more: Attention to the keys of another part; overwritten if it is fp32.
        more_lse: Log-sum-exp of its scores.
    """
    top = torch.maximum(lse, more_lse)
    base = top.masked_fill(top == -torch.inf, 0.0)  # padding sees no key of either
    first, second = (lse - base).exp(), (more_lse - base).exp()
    total = (first + second).clamp_min(1.0)  # the larger of the two is 1, but for padding
    out.mul_((first / total)[..., None])
    out.add_(more.float().mul_((second / total)[..., None]))
    return out, top + total.log()


def _block(blocks: Sequence[AttentionPlan], context: ContextGroup, step: int) -> AttentionPlan:
    """Return the plan for the keys that are here at a step."""
    own, earlier, later = blocks
    if step == 0:
        return own
    return earlier if step <= context.ring_rank else later


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        q, k, v, blocks, context, scale = inputs
        travelling = Travelling(k, v, context, _KEYS)
        out, lse = None, None
        for step in range(context.ring_size):
            last = step == context.ring_size - 1
            if not last:
                travelling.start()
            part, part_lse = _block(blocks, context, step).forward(q, *travelling.tensors, scale)
            if out is None or lse is None:
                out, lse = part.float(), part_lse
            else:
                out, lse = merged(out, lse, part, part_lse)
            if not last:
                travelling.finish()
        assert out is not None
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = blocks, context, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        blocks, context, scale = ctx.settings
        keys = Travelling(k, v, context, _KEYS)
        dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
        sums = Travelling(dk, dv, context, _GRADIENTS)
        dq = torch.zeros_like(q, dtype=torch.float32)
        for step in range(context.ring_size):
            last = step == context.ring_size - 1
            if not last:
                keys.start()
            plan = _block(blocks, context, step)
            parts = plan.backward(grad, q, *keys.tensors, out, lse, scale)
            dq += parts[0]
            if step:
                sums.finish()
            sums.add(*parts[1:])
            sums.start()
            if not last:
                keys.finish()
        sums.finish()
        dk, dv = sums.tensors
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    blocks: Sequence[AttentionPlan],
    context: ContextGroup,
    scale: float | None,
) -> torch.Tensor:
    """Attend to the keys of all ranks of a ring, with gradients. Collective: the row's group.

    Sums over ranks are in fp32. The backward pass needs the keys of this rank only, and lets them
    travel once more.

    Args:
        q: [T, n, d].
        k: [T, m, d].
        v: [T, m, dv].
        blocks: Plans for own keys, those of earlier ranks, and those of later ranks.
        context: Ranks that share the row.
        scale: Factor of the scores; ``None``: 1 / sqrt(d).

    Returns:
        [T, n, dv], zero at padding.
    """
    found: torch.Tensor = _RingAttention.apply(  # type: ignore[no-untyped-call]
        q, k, v, blocks, context, scale
    )
    return found
