"""Computes vocab-parallel log-probs and entropies of selected tokens, in chunks.

Shapes: N selected positions, h hidden size, V_t vocabulary rows of this tensor-parallel rank.

Logits of at most ``chunk`` positions exist at a time, in the forward and (recomputed) in the
backward pass. Statistics of all chunks are gathered over the tensor-parallel group in one call,
whatever N is; every rank then adds them up in the same order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mindspeed_rl.parallel.small_collectives import gather_rows


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
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num = hidden.size(0)
        # Rows, over this rank's vocabulary: max x, sum of exp(x - max),
        # sum of exp(x - max) * (x - max), x[target] - max.
        stats = hidden.new_zeros((4, num), dtype=torch.float32)
        stats[0] = float("-inf")
        local = targets - vocab_start
        owned = (local >= 0) & (local < vocab_end - vocab_start)
        index = local.clamp(0, max(0, vocab_end - vocab_start - 1))
        rows = weight[: vocab_end - vocab_start]
        for span in _spans(num, chunk):
            logits = _logits(hidden[span], rows, temperature)
            if logits.size(1) == 0:
                continue
            top = logits.amax(-1)
            logits -= top[:, None]
            exp = logits.exp()
            stats[0, span] = top
            stats[1, span] = exp.sum(-1)
            stats[2, span] = (exp * logits).sum(-1)
            stats[3, span] = logits.gather(-1, index[span, None])[:, 0]
        everyone = stats[None] if group is None else gather_rows(stats, group)
        # AI Cores divide int32; int64 would be divided on an NPU's AICPU.
        top_all, sums = _combined(everyone, (targets.int() // weight.size(0)).long())
        log_z = sums[0].log()
        logprobs = sums[2] - log_z
        entropy = log_z - sums[1] / sums[0]
        ctx.save_for_backward(hidden, weight, index, owned, top_all + log_z, entropy)
        ctx.settings = (temperature, vocab_end - vocab_start, chunk)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, index, owned, log_z, entropy = ctx.saved_tensors
        temperature, num_rows, chunk = ctx.settings
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(log_z)
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        rows = weight[:num_rows]
        if num_rows:
            for span in _spans(hidden.size(0), chunk):
                logp = _logits(hidden[span], rows, temperature).sub_(log_z[span, None])
                # d logp_t / d x = onehot - p;  d H / d x = -p (log p + H)
                if grad_entropy is None:
                    grad = logp.exp_().mul_(-grad_logprobs[span, None])
                else:
                    slope = grad_entropy[span, None] * (logp + entropy[span, None])
                    grad = -logp.exp() * (grad_logprobs[span, None] + slope)
                own = (grad_logprobs[span] * owned[span])[:, None]
                grad.scatter_add_(-1, index[span, None], own)
                grad = grad.div_(temperature).to(hidden.dtype)
                grad_hidden[span] = grad @ rows
                grad_weight[:num_rows] += grad.t() @ hidden[span]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None, None


def _combined(stats: torch.Tensor, holder: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine the statistics of the vocabulary's parts into those of the whole vocabulary.

    Args:
        stats: [ranks, 4, N] statistics, of each part relative to its own maximum.
        holder: [N] int64, the rank that has the target.

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


def _spans(num: int, chunk: int) -> list[slice]:
    return [slice(i, min(i + chunk, num)) for i in range(0, num, chunk)]


def _logits(hidden: torch.Tensor, rows: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return fp32 logits [n, v] over temperature of [n, h] hidden states and [v, h] weights."""
    return (hidden @ rows.t()).float().div_(temperature)


def selected_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    vocab_size: int,
    tp_rank: int,
    group: dist.ProcessGroup | None,
    chunk: int,
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
        chunk: Number of positions whose logits exist at a time.

    Returns:
        Log-probs [N] fp32 and entropies [N] fp32, in nats.
    """
    start = tp_rank * weight.size(0)
    end = max(start, min(start + weight.size(0), vocab_size))
    result: tuple[torch.Tensor, torch.Tensor] = _SelectedLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, temperature, start, end, group, chunk
    )
    return result
