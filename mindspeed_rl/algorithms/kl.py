"""Estimators of KL(policy || reference) from the sampled tokens alone, and their coefficient.

Shapes: N trained tokens. Estimators k1, k2, k3: http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

import torch

from mindspeed_rl.algorithms.bounds import bounded

STRAIGHT_THROUGH = "+"


def kl_estimate(logprobs: torch.Tensor, reference: torch.Tensor, estimator: str) -> torch.Tensor:
    """KL(policy || reference) per token, with d = log p - log p_ref.

    k1 = d, unbiased, of either sign, and its gradient is 0 on average; abs is the magnitude of d;
    k2 = d^2 / 2, whose gradient d * grad log p is that of the KL on average; k3 = exp(-d) + d - 1,
    unbiased and never negative. A trailing ``+`` keeps the value and takes the gradient of k2
    (Liu et al. 2025, arXiv:2510.01555).

    Args:
        logprobs: [N], of the policy, with or without gradient.
        reference: [N], of the reference.
        estimator: a value of ``--rl-kl-estimator``.

    Returns:
        [N] in nats.
    """
    name = estimator.removesuffix(STRAIGHT_THROUGH)
    difference = bounded(logprobs - reference)
    squared = 0.5 * difference.square()
    value = {
        "k1": difference,
        "abs": difference.abs(),
        "k2": squared,
        "k3": (-difference).exp() + difference - 1.0,
    }[name]
    if name == estimator:
        return value
    return squared - squared.detach() + value.detach()


# The coefficient changes by at most this share of num_samples / horizon in one step.
MAX_RELATIVE_ERROR = 0.2


def adapted_coefficient(
    coefficient: float, kl: float, *, target: float, horizon: float, num_samples: int
) -> float:
    """The KL coefficient after a step: larger when the KL is above its target, else smaller.

    c (1 + clip(kl / target - 1, -0.2, 0.2) num_samples / horizon) (Ziegler et al. 2019,
    arXiv:1909.08593, section 2.2); steps of more samples than the horizon count as the horizon, so
    that the coefficient never changes its sign.

    Args:
        coefficient: of the step.
        kl: mean estimate per token of the step, in nats.
        target: wanted value of it.
        horizon: samples over which the coefficient grows by a fifth.
        num_samples: of the step.
    """
    error = min(max(kl / target - 1.0, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
    return coefficient * (1.0 + error * min(1.0, num_samples / horizon))
