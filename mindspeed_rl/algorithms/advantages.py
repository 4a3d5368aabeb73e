"""Advantages of groups of samples."""

from __future__ import annotations

import torch

# Below this a group's standard deviation is rounding: its advantages are 0 (R37).
MIN_STD = 1e-4


def group_relative_advantages(rewards: torch.Tensor, *, divide_by_std: bool) -> torch.Tensor:
    """GRPO: A = (r - mean) / (std + 1e-4) within each group (Shao et al. 2024, arXiv:2402.03300).

    Without the division it is Dr. GRPO's estimator (Liu et al. 2025, arXiv:2503.20783). Samples
    whose reward is NaN (abstained) get 0 and stay out of their group's mean (R43); a group of
    equal rewards, or with fewer than two rewards, gets 0. The standard deviation is unbiased and
    computed in two passes.

    Args:
        rewards: [groups, group size] fp32, NaN where a reward abstained.
        divide_by_std: GRPO (true) or Dr. GRPO.

    Returns:
        [groups, group size] fp32.
    """
    known = ~rewards.isnan()
    count = known.sum(1, keepdim=True)
    values = rewards.masked_fill(~known, 0.0)
    mean = values.sum(1, keepdim=True) / count.clamp(min=1)
    centred = (values - mean).masked_fill(~known, 0.0)
    variance = centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)
    std = variance.sqrt()
    degenerate = (std < MIN_STD) | (count < 2)
    if divide_by_std:
        centred = centred / (std + MIN_STD)
    return centred.masked_fill(degenerate, 0.0)
