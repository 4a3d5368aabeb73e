"""Selects tokens over the whole optimizer step, before it is cut into micro-batches.

Shapes: N trained tokens of each micro-batch of this rank.

Which tokens are chosen depends on their log-prob, advantage, sample and place alone, so every
layout chooses the same ones, up to rounding of the log-probs. Ranks exchange no tokens: a selection
needs eight sums of 256 counts over the ranks that hold the other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mindspeed_rl.algorithms.policy_losses import Selection, SurrogateSettings
from mindspeed_rl.algorithms.types import SumOverRanks

_BYTES = 8  # size of a key
_SIGN = -(2**63)


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The trained tokens of one optimizer step on this rank, by micro-batch, each [N].

    Attributes:
        logprobs: Log-probs of the present policy, without gradient.
        log_ratio: Log-ratio to the old policy.
        advantages: Advantage of each token.
        sample_ids: int64 sample of each token, equal in every layout.
        places: int64 position of each token in its sequence.
    """

    logprobs: Sequence[torch.Tensor]
    log_ratio: Sequence[torch.Tensor]
    advantages: Sequence[torch.Tensor]
    sample_ids: Sequence[torch.Tensor]
    places: Sequence[torch.Tensor]


def select_by_covariance(
    tokens: StepTokens,
    selection: Selection,
    settings: SurrogateSettings,
    seed: int,
    reduce: SumOverRanks,
) -> list[torch.Tensor]:
    """Select by (log p - mean log p)(A - mean A), means over the step: [N] bool per micro-batch.

    Cui et al. 2025, arXiv:2505.22617. Collective as ``reduce``: 10 calls.

    Args:
        tokens: Tokens of this rank.
        selection: ``largest`` covariances, or ``random`` ones within the bounds of the settings
            that the clip of the ratio does not stop anyway.
        settings: Bounds, and the share of the trained tokens that is selected, at least one token.
        seed: Seed of the random choice, different for every optimizer step.
        reduce: Sums a tensor over the ranks that hold the other tokens.
    """
    covariances = _covariances(tokens, reduce)
    device = tokens.logprobs[0].device
    count = torch.tensor([sum(c.numel() for c in covariances)], device=device)
    number = max(1, int(settings.cov_ratio * int(reduce(count))))
    keys, allowed = [], []
    for i, covariance in enumerate(covariances):
        tie = _hashed(tokens.sample_ids[i], tokens.places[i], seed)
        if selection == "largest":
            keys.append(_ordered(covariance) & ~0xFFFFFFFF | tie & 0xFFFFFFFF)
            allowed.append(torch.ones_like(covariance, dtype=torch.bool))
        else:
            keys.append(tie)
            lower, upper = settings.clip_cov_lower, settings.clip_cov_upper
            inside = (covariance > lower) & (covariance < upper)
            allowed.append(inside & ~_stopped(tokens, settings, i))
    return largest_keys(keys, allowed, number, reduce)


def _covariances(tokens: StepTokens, reduce: SumOverRanks) -> list[torch.Tensor]:
    def total(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack([p.sum() for p in parts]).sum()

    count = total([torch.ones_like(p) for p in tokens.logprobs])
    sums = reduce(torch.stack([total(tokens.logprobs), total(tokens.advantages), count]))
    logprob, advantage = (sums[:2] / sums[2].clamp(min=1)).unbind()
    pairs = zip(tokens.logprobs, tokens.advantages, strict=True)
    return [(logp - logprob) * (a - advantage) for logp, a in pairs]


def _stopped(tokens: StepTokens, settings: SurrogateSettings, i: int) -> torch.Tensor:
    """Return where the clip of the ratio leaves no gradient."""
    ratio, advantage = tokens.log_ratio[i].exp(), tokens.advantages[i]
    above = (ratio > 1 + settings.eps_upper) & (advantage > 0)
    return above | ((ratio < 1 - settings.eps_lower) & (advantage < 0))


def _ordered(values: torch.Tensor) -> torch.Tensor:
    """Map fp32 to the upper half of int64 in the same order; NaN is the smallest."""
    bits = values.float().contiguous().view(torch.int32).to(torch.int64)
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return torch.where(values.isnan(), torch.full_like(bits, -(2**31)), bits) << 32


def _hashed(sample_ids: torch.Tensor, places: torch.Tensor, seed: int) -> torch.Tensor:
    """Hash sample, place and seed to a random-looking int64 (the mixing of splitmix64)."""
    mixed = sample_ids * 0x632BE5AB + places * 0x9E3779B1 + (seed * 0x85EBCA77 & (2**62 - 1))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)):
        mixed = (mixed ^ (mixed >> shift & (1 << 64 - shift) - 1)) * factor
    return mixed ^ (mixed >> 31 & (1 << 33) - 1)


def largest_keys(
    keys: Sequence[torch.Tensor], allowed: Sequence[torch.Tensor], number: int, reduce: SumOverRanks
) -> list[torch.Tensor]:
    """Mark the ``number`` largest allowed keys of all ranks; all of them when there are fewer.

    Radix selection: byte by byte from the top, the counts of each value are summed over the ranks.
    Keys that are equal to the smallest chosen one are all chosen. Collective: 8 calls of
    ``reduce``.

    Args:
        keys: [N] int64 of each micro-batch.
        allowed: [N] bool of each micro-batch.
        number: Number of keys to choose.
        reduce: Sums an int64 tensor over the ranks.
    """
    border = _smallest_chosen(keys, allowed, number, reduce)
    return [(k >= border) & a for k, a in zip(keys, allowed, strict=True)]


def _smallest_chosen(
    keys: Sequence[torch.Tensor], allowed: Sequence[torch.Tensor], number: int, reduce: SumOverRanks
) -> int:
    """Find the least of the ``number`` largest allowed keys of all ranks. Collective: 8 calls."""
    # Flipping the sign bit makes the order of signed integers that of unsigned ones.
    flat, left = torch.cat([k ^ _SIGN for k in keys]), torch.cat(list(allowed))
    border = 0
    for level in range(_BYTES - 1, -1, -1):
        digit = flat >> 8 * level & 0xFF
        counts = reduce(flat.new_zeros(256).index_add_(0, digit, left.long())).tolist()
        value = 255
        while value > 0 and counts[value] < number:
            number -= counts[value]
            value -= 1
        border |= value << 8 * level
        left = left & (digit == value)
    if border >= 2**63:
        border -= 2**64
    return border ^ _SIGN  # back to the order of signed integers
