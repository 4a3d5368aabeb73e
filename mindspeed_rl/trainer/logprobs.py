"""Computes vocab-parallel log-probs and entropies of selected tokens, block by block.

Shapes: N selected positions, h hidden size, V_t vocabulary rows of this tensor-parallel rank.

Logits exist in blocks of some positions times some ids, in the forward and (recomputed) in the
backward pass. Each block gives statistics of its part of the vocabulary, which are combined within
the rank and then, gathered in one call whatever N is, over the tensor-parallel group; every rank
combines them in the same order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mindspeed_rl.core.logit_tiles import LogitTile, logit_tile
from mindspeed_rl.parallel.small_collectives import gather_rows
from mindspeed_rl.trainer.weight_gradient import WeightGradient


class _SelectedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        vocab_start: int,
        vocab_end: int,
        group: dist.ProcessGroup | None,
        tile: LogitTile,
        into: WeightGradient,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_rows = vocab_end - vocab_start
        local = targets - vocab_start
        rows = weight[:num_rows]
        stats = [
            _statistics(hidden[span], rows, local[span], temperature, tile.columns)
            for span in _spans(hidden.size(0), tile.rows)
        ]
        mine = torch.cat(stats, dim=1) if stats else hidden.new_zeros((4, 0), dtype=torch.float32)
        everyone = mine[None] if group is None else gather_rows(mine, group)
        # AI Cores divide int32; int64 would be divided on an NPU's AICPU.
        top, sums = _combined(everyone, (targets.int() // weight.size(0)).long())
        log_z = sums[0].log()
        logprobs = sums[2] - log_z
        entropy = log_z - sums[1] / sums[0]
        ctx.save_for_backward(hidden, weight, local, top + log_z, entropy)
        ctx.settings = (temperature, num_rows, tile, into)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, local, log_z, entropy = ctx.saved_tensors
        temperature, num_rows, tile, into = ctx.settings
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(log_z)
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        # The output projection under adapters is not trained.
        total = into.begin(weight) if ctx.needs_input_grad[1] else None
        for columns in _spans(num_rows, tile.columns):
            rows = weight[columns]
            part: torch.Tensor | None = None
            for span in _spans(hidden.size(0), tile.rows):
                logp = _logits(hidden[span], rows, temperature).sub_(log_z[span, None])
                # d logp_t / d x = onehot - p;  d H / d x = -p (log p + H)
                slope = -grad_logprobs[span, None] / temperature
                if grad_entropy is None:
                    grad = logp.exp_().mul_(slope)
                else:
                    bend = -grad_entropy[span, None] / temperature
                    factor = (logp + entropy[span, None]).mul_(bend).add_(slope)
                    grad = logp.exp_().mul_(factor)
                index, owned = _within(local[span], columns)
                own = (-slope[:, 0] * owned)[:, None]
                grad = grad.scatter_add_(-1, index[:, None], own).to(hidden.dtype)
                grad_hidden[span] += grad @ rows
                if total is not None:
                    part = into.product(total[columns], grad, hidden[span], part)
            if total is not None and part is not None:
                total[columns] += part
        grad_weight = None if total is None else into.end(weight, total)
        return grad_hidden.to(hidden.dtype), grad_weight, *[None] * 7


def _statistics(
    hidden: torch.Tensor, rows: torch.Tensor, local: torch.Tensor, temperature: float, columns: int
) -> torch.Tensor:
    """Return [4, n] fp32 statistics of [n, h] hidden states over all rows of a rank.

    They are max x, sum of exp(x - max), sum of exp(x - max) * (x - max), x[target] - max.

    Args:
        hidden: [n, h] hidden states.
        rows: [v, h] weights of the rank's ids.
        local: [n] int64, targets relative to the first of the ids; the rank may lack them.
        temperature: Divisor of the logits.
        columns: Number of ids whose logits exist at a time.
    """
    blocks = []
    for span in _spans(rows.size(0), columns):
        logits = _logits(hidden, rows[span], temperature)
        top = logits.amax(-1)
        logits -= top[:, None]
        index, _ = _within(local, span)
        picked = logits.gather(-1, index[:, None])[:, 0]
        exp = logits.exp()
        total = exp.sum(-1)
        blocks.append(torch.stack([top, total, exp.mul_(logits).sum(-1), picked]))
    if not blocks:  # all rows of the rank are padding
        none = hidden.new_zeros((4, hidden.size(0)), dtype=torch.float32)
        none[0] = float("-inf")
        return none
    holder = local.clamp(0, rows.size(0) - 1).int() // columns
    top, sums = _combined(torch.stack(blocks), holder.long())
    return torch.cat([top[None], sums])


def _combined(stats: torch.Tensor, holder: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine the statistics of the vocabulary's parts into those of the whole vocabulary.

    Args:
        stats: [parts, 4, N] statistics, of each part relative to its own maximum.
        holder: [N] int64, the part that has the target.

    Returns:
        The maximum [N], and the three other statistics [3, N] relative to it.
    """
    local_max, total, weighted, picked = stats.unbind(1)
    top = local_max.amax(0)
    shift = local_max - top
    scale = shift.exp()
    # A rank that holds only padding has max -inf and sums of 0. A rank whose logits are so low that
    # its scale is 0 still has log-probs.
    safe_shift = shift.masked_fill(local_max == float("-inf"), 0.0)
    weighted = (weighted + safe_shift * total) * scale
    picked = (picked + safe_shift).gather(0, holder[None])[0]
    return top, torch.stack([(total * scale).sum(0), weighted.sum(0), picked])


def _spans(num: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, num)) for i in range(0, num, max(1, size))]


def _within(local: torch.Tensor, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places of targets in a block of ids, clamped, and which of them are in it."""
    index = local - columns.start
    last = columns.stop - columns.start - 1
    return index.clamp(0, last), (index >= 0) & (index <= last)


def _logits(hidden: torch.Tensor, rows: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return fp32 logits [n, v] over temperature of [n, h] hidden states and [v, h] weights."""
    logits = (hidden @ rows.t()).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def selected_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    vocab_size: int,
    tp_rank: int,
    group: dist.ProcessGroup | None,
    chunk: int = 0,
    into: WeightGradient | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log p(target) and entropy of softmax(hidden weight^T / temperature).

    Collective over ``group`` (the tensor-parallel group; ``None`` for one rank). Padding rows of
    the vocabulary have probability 0. Gradients flow to ``hidden`` and ``weight``; the gradient of
    ``hidden`` is this rank's part of a sum that the caller's tensor-parallel region adds up.

    Args:
        hidden: [N, h] hidden states.
        weight: [V_t, h], this rank's rows of the output projection.
        targets: [N] int64, global token ids below ``vocab_size``.
        temperature: Divisor of the logits.
        vocab_size: Size of the real vocabulary; later rows are padding.
        tp_rank: Position of this rank in ``group``.
        group: Tensor-parallel group.
        chunk: Number of positions whose logits exist at a time; 0 chooses by memory.
        into: Where the gradient of ``weight`` is added up; ``None``: it is returned.

    Returns:
        Log-probs [N] fp32 and entropies [N] fp32, in nats.
    """
    start = tp_rank * weight.size(0)
    end = max(start, min(start + weight.size(0), vocab_size))
    tile = logit_tile(chunk, hidden.size(0), end - start, on_host=hidden.device.type == "cpu")
    result: tuple[torch.Tensor, torch.Tensor] = _SelectedLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, temperature, start, end, group, tile, into or WeightGradient()
    )
    return result
