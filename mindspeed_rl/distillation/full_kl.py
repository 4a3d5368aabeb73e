"""The KL of two vocabulary-parallel distributions, exactly, block by block.

Shapes: n tokens, h and k hidden sizes of policy and teacher, v ids of the vocabulary on this
tensor-parallel rank.

Logits of both models exist in blocks of some tokens times some ids, in the forward and (recomputed)
in the backward pass, as in ``trainer/logprobs.py``. Every number is kept relative to the largest
logit of its block, so that nothing overflows and the difference of two logits loses no digits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_rl.core.logit_tiles import LogitTile
from mindspeed_rl.parallel.small_collectives import gather_rows
from mindspeed_rl.trainer.weight_gradient import WeightGradient


@dataclass(frozen=True, slots=True)
class KLSettings:
    """How the KL is computed.

    Attributes:
        temperature: Divisor of the logits of both models.
        num_ids: Ids of the real vocabulary on this rank; later rows of a weight are padding.
        tile: Size of a block.
        group: Tensor-parallel group; ``None`` for one rank.
        into: Where the gradient of the policy's weight is added up.
    """

    temperature: float
    num_ids: int
    tile: LogitTile
    group: dist.ProcessGroup | None
    into: WeightGradient


def reverse_kl(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    settings: KLSettings,
) -> torch.Tensor:
    """Return KL(policy || teacher) over the whole vocabulary at each token: [n] fp32, in nats.

    sum_y p(y) (log p(y) - log q(y)), whose gradient by a logit of the policy is
    p(y) (log p(y) - log q(y) - KL). Gradients flow to ``hidden`` and ``weight``; that of ``hidden``
    is this rank's part of a sum over the group. Collective: the group.

    Args:
        hidden: [n, h] last hidden states of the policy.
        weight: [at least v, h] its output projection.
        teacher_hidden: [n, k] of the teacher.
        teacher_weight: [at least v, k].
        settings: How to compute.
    """
    result: torch.Tensor = _ReverseKL.apply(  # type: ignore[no-untyped-call]
        hidden, weight, teacher_hidden, teacher_weight, settings
    )
    return result


class _ReverseKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        teacher_hidden: torch.Tensor,
        teacher_weight: torch.Tensor,
        settings: KLSettings,
    ) -> torch.Tensor:
        empty = hidden.new_zeros((5, 0), dtype=torch.float32)
        parts = [
            _statistics(hidden[rows], weight, teacher_hidden[rows], teacher_weight, settings)
            for rows in _spans(hidden.size(0), settings.tile.rows)
        ]
        mine = torch.cat([empty, *parts], dim=1)
        everyone = mine[None] if settings.group is None else gather_rows(mine, settings.group)
        top, total, difference, teacher_top, teacher_total = _combined(everyone)
        log_z, teacher_log_z = top + total.log(), teacher_top + teacher_total.log()
        # sum p (x - z) less log Z_x, plus log Z_z; the sum is relative to both largest logits.
        kl: torch.Tensor = difference / total - total.log() + teacher_total.log()
        ctx.save_for_backward(
            hidden, weight, teacher_hidden, teacher_weight, log_z, teacher_log_z, kl
        )
        ctx.settings = settings
        return kl

    @staticmethod
    def backward(ctx: Any, grad_kl: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, teacher_hidden, teacher_weight, log_z, teacher_log_z, kl = ctx.saved_tensors
        settings: KLSettings = ctx.settings
        slope = grad_kl / settings.temperature
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        total = settings.into.begin(weight)
        for ids in _spans(settings.num_ids, settings.tile.columns):
            part: torch.Tensor | None = None
            for rows in _spans(hidden.size(0), settings.tile.rows):
                logp = _logits(hidden[rows], weight[ids], settings.temperature)
                logp -= log_z[rows, None]
                logq = _logits(teacher_hidden[rows], teacher_weight[ids], settings.temperature)
                logq -= teacher_log_z[rows, None]
                grad = (logp - logq).sub_(kl[rows, None]).mul_(logp.exp_()).mul_(slope[rows, None])
                grad = grad.to(hidden.dtype)
                grad_hidden[rows] += grad @ weight[ids]
                part = settings.into.product(total[ids], grad, hidden[rows], part)
            if part is not None:
                total[ids] += part
        grad_weight = settings.into.end(weight, total)
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None


def _statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    settings: KLSettings,
) -> torch.Tensor:
    """Return [5, n] fp32 over all ids of a rank, of logits x of the policy and z of the teacher.

    They are max x, sum of exp(x - max x), sum of exp(x - max x) ((x - max x) - (z - max z)), max z,
    and sum of exp(z - max z).
    """
    blocks = []
    for ids in _spans(settings.num_ids, settings.tile.columns):
        x = _logits(hidden, weight[ids], settings.temperature)
        z = _logits(teacher_hidden, teacher_weight[ids], settings.temperature)
        top, teacher_top = x.amax(-1), z.amax(-1)
        x -= top[:, None]
        z -= teacher_top[:, None]
        exp = x.exp()
        difference = x.sub_(z).mul_(exp).sum(-1)
        blocks.append(torch.stack([top, exp.sum(-1), difference, teacher_top, z.exp_().sum(-1)]))
    if not blocks:  # all ids of the rank are padding
        nothing = hidden.new_zeros((5, hidden.size(0)), dtype=torch.float32)
        nothing[[0, 3]] = float("-inf")
        return nothing
    return _combined(torch.stack(blocks))


def _combined(stats: torch.Tensor) -> torch.Tensor:
    """Combine the statistics of parts of the vocabulary: [parts, 5, n] -> [5, n].

    A part of padding alone has maxima of minus infinity and sums of 0.
    """
    tops, totals, differences, teacher_tops, teacher_totals = stats.unbind(1)
    top, teacher_top = tops.amax(0), teacher_tops.amax(0)
    nothing = tops == float("-inf")
    shift = (tops - top).masked_fill(nothing, 0.0)
    teacher_shift = (teacher_tops - teacher_top).masked_fill(nothing, 0.0)
    scale, teacher_scale = shift.exp(), teacher_shift.exp()
    differences = (differences + (shift - teacher_shift) * totals) * scale
    return torch.stack([
        top,
        (totals * scale).sum(0),
        differences.sum(0),
        teacher_top,
        (teacher_totals * teacher_scale).sum(0),
    ])  # fmt: skip


def _spans(number: int, size: int) -> Iterator[slice]:
    for start in range(0, number, max(1, size)):
        yield slice(start, min(start + size, number))


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return fp32 logits [n, v] over temperature of [n, h] hidden states and [v, h] weights."""
    return (hidden @ weight.t()).float().div_(temperature)
