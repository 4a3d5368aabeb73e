"""Advantages that differ between the tokens of a sample, and statistics over all tokens.

Shapes: N trained tokens of S whole sequences, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F

from mindspeed_rl.algorithms.bounds import MIN_STD

# Tokens of a block of a scan: products of a block cost as many operations per token.
_BLOCK = 128


def discounted_sums(values: torch.Tensor, lengths: Sequence[int], discount: float) -> torch.Tensor:
    """Compute R_t = v_t + discount R_{t+1} within each sequence, 0 behind its last token. Local.

    A scan in blocks: there is no loop over tokens. See :func:`_scan`.

    Args:
        values: [N].
        lengths: Number of tokens of each of the S sequences; they add up to N.
        discount: Discount of one token.

    Returns:
        [N].
    """
    if not values.numel():
        return values
    rows = torch.nn.utils.rnn.pad_sequence(
        list(torch.split(values, list(lengths))), batch_first=True
    )
    if discount == 1.0:
        rows = rows.flip(1).cumsum(1).flip(1)
    elif discount:
        rows = _scan(rows, discount)
    return torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])


def _scan(rows: torch.Tensor, discount: float) -> torch.Tensor:
    """Compute R_t = v_t + discount R_{t+1} along each row: [S, L] -> [S, L].

    Rows are cut into blocks of B tokens. Within a block R is a product with the triangular matrix
    of powers discount^(j - i). What a block gets from the next one is the first R of that one,
    times a power; these first values follow the same recursion, with discount^B and L / B of them.
    """
    number, length = rows.shape
    size = min(_BLOCK, length)
    blocks = F.pad(rows, (0, -length % size)).view(number, -1, size)
    powers = torch.tensor([discount**k for k in range(size + 1)], dtype=torch.float64)
    distance = torch.arange(size)[None] - torch.arange(size)[:, None]  # j - i
    triangle = torch.where(distance >= 0, powers[distance.clamp(min=0)], 0.0)
    total = blocks @ triangle.to(rows).t()
    if blocks.size(1) > 1:
        first = _scan(total[:, :, 0], discount**size)
        behind = F.pad(first[:, 1:], (0, 1))
        total = total + behind[..., None] * powers[1:].flip(0).to(rows)
    return total.reshape(number, -1)[:, :length]


def rewards_to_tokens(rewards: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Put the reward of each sequence at its last token, 0 elsewhere: [S] -> [N]. Local."""
    tokens = rewards.new_zeros(sum(lengths))
    ends = [end for end, length in zip(accumulate(lengths), lengths, strict=True) if length]
    places = [[end - 1 for end in ends], [i for i, length in enumerate(lengths) if length]]
    last, owner = torch.tensor(places, dtype=torch.int64, device=rewards.device)
    return tokens.index_copy_(0, last, rewards.index_select(0, owner))


@dataclass(frozen=True, slots=True)
class ValueTargets:
    """Advantages, and the returns that a critic's values should match, both [N]."""

    advantages: torch.Tensor
    returns: torch.Tensor


def generalized_advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    lengths: Sequence[int],
    *,
    discount: float,
    trace_decay: float,
) -> ValueTargets:
    """GAE: A_t = d_t + (discount trace_decay) A_{t+1}, d_t = r_t + discount V_{t+1} - V_t. Local.

    Schulman et al. 2015, arXiv:1506.02438. V is 0 behind the last token of a sequence. Returns are
    A + V, the targets of the critic.

    Args:
        rewards: [N] reward of each token.
        values: [N] values of the critic, without gradient.
        lengths: Number of tokens of each sequence.
        discount: gamma.
        trace_decay: lambda; 1 is the discounted return less the value, 0 the one-step error.
    """
    following = values.roll(-1)
    lasting = torch.tensor([n for n in lengths if n], dtype=torch.int64, device=values.device)
    following[lasting.cumsum(0) - 1] = 0.0
    errors = rewards + discount * following - values
    advantages = discounted_sums(errors, lengths, discount * trace_decay)
    return ValueTargets(advantages, advantages + values)


def whitened(
    parts: Sequence[torch.Tensor],
    counted: Sequence[torch.Tensor],
    reduce: Callable[[torch.Tensor], torch.Tensor],
) -> list[torch.Tensor]:
    """Compute (x - mean) / std over all counted tokens of the step, on all ranks and micro-batches.

    The standard deviation is unbiased, in two passes. All 0 when it is below 1e-4 or fewer than
    two tokens count. The host does not wait for the device. Collective as ``reduce`` is: two calls.

    Args:
        parts: [N] of each micro-batch of this rank.
        counted: [N] bool of each micro-batch; other tokens become 0 and are in no statistic.
        reduce: Sums a tensor over the ranks that hold the other tokens.
    """
    others = [~mask for mask in counted]
    total, number = reduce(torch.stack([_sum(parts, others), _total(counted).to(parts[0])]))
    mean = total / number.clamp(min=1)
    squares = reduce(_sum([(x - mean).square() for x in parts], others)[None])[0]
    std = (squares / (number - 1).clamp(min=1)).sqrt()
    flat = (std < MIN_STD) | (number < 2)
    return [
        ((x - mean) / std).masked_fill(other | flat, 0.0)
        for x, other in zip(parts, others, strict=True)
    ]


def _sum(parts: Sequence[torch.Tensor], left_out: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of all values that are not left out, which may be NaN."""
    return _total([x.masked_fill(mask, 0.0) for x, mask in zip(parts, left_out, strict=True)])


def _total(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([x.sum() for x in parts]).sum()
