"""Estimators of KL(policy || reference) from the sampled tokens alone, and their coefficient.

Shapes: N trained tokens; d = log p - log p_ref. k1, k2, k3: http://joschu.net/blog/kl-approx.html.

A new estimator is a function here with its declaration above it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mindspeed_rl.algorithms.bounds import bounded
from mindspeed_rl.algorithms.catalogue import Catalogue, Choice

if TYPE_CHECKING:
    import torch

STRAIGHT_THROUGH = "+"
# A token that the policy has made 13 times less likely than the reference has a k3 of 10, and a
# gradient of -12.6. A few tokens further apart would outweigh the rest of a step.
MAX_K3 = 10.0
OfDifference = Callable[["torch.Tensor"], "torch.Tensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KLEstimator(Choice):
    """An estimator of the KL of a token.

    Attributes:
        formula: Computes the estimate, [N] in nats, from d, [N].
        in_loss_only: Whether only its gradient differs from that of another estimator.
        bound: Largest estimate of a token in a loss; what is above has no gradient.
    """

    formula: OfDifference
    in_loss_only: bool = False
    bound: float = math.inf


KL_ESTIMATORS = Catalogue("--rl-kl-estimator", KLEstimator)


@KL_ESTIMATORS.declare("d, unbiased, of either sign; its gradient is 0 on average", name="k1")
def _k1(difference: torch.Tensor) -> torch.Tensor:
    return difference


@KL_ESTIMATORS.declare("|d|", name="abs")
def _magnitude(difference: torch.Tensor) -> torch.Tensor:
    return difference.abs()


@KL_ESTIMATORS.declare("d^2 / 2, whose gradient is that of the KL on average", name="k2")
def _k2(difference: torch.Tensor) -> torch.Tensor:
    return 0.5 * difference.square()


@KL_ESTIMATORS.declare(
    "exp(-d) + d - 1, unbiased and never negative, in a loss at most 10; its gradient is biased, "
    "and 0 beyond that bound",
    name="k3",
    bound=MAX_K3,
)
def _k3(difference: torch.Tensor) -> torch.Tensor:
    return k3(difference)


def k3(difference: torch.Tensor) -> torch.Tensor:
    """Return exp(-d) + d - 1 of log-ratios d within +-20 nats, never negative.

    Near 0 the terms cancel: exp(-d) - 1 would leave rounding errors of either sign, far larger than
    d^2 / 2. expm1 keeps them below one unit in the last place of d, which the clamp removes.
    """
    difference = bounded(difference)
    return (difference + (-difference).expm1()).clamp(min=0.0)


def _straight_through(estimator: KLEstimator) -> KLEstimator:
    """Give an estimator the gradient of k2 (Liu et al. 2025, arXiv:2510.01555)."""

    def value(difference: torch.Tensor) -> torch.Tensor:
        squared = _k2(difference)
        estimate = estimator.formula(difference).clamp(max=estimator.bound)
        return squared - squared.detach() + estimate.detach()

    return KLEstimator(
        name=estimator.name + STRAIGHT_THROUGH,
        summary=f"the value of {estimator.name} with the gradient of k2",
        source="arXiv:2510.01555",
        formula=value,
        in_loss_only=True,
    )


for _estimator in [e for e in KL_ESTIMATORS.values() if e.formula is not _k2]:
    KL_ESTIMATORS.add(_straight_through(_estimator))


def kl_estimate(logprobs: torch.Tensor, reference: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimate KL(policy || reference) per token, with log-ratios within +-20 nats, bounded.

    Args:
        logprobs: [N] log-probs of the policy, with or without gradient.
        reference: [N] log-probs of the reference.
        estimator: A name of :data:`KL_ESTIMATORS`.

    Returns:
        [N] in nats.
    """
    chosen = KL_ESTIMATORS[estimator]
    return chosen.formula(bounded(logprobs - reference)).clamp(max=chosen.bound)


# In one step the coefficient changes by at most this fraction of num_samples / horizon.
MAX_RELATIVE_ERROR = 0.2


def adapted_coefficient(
    coefficient: float, kl: float, *, target: float, horizon: float, num_samples: int
) -> float:
    """Return the KL coefficient after a step: larger if the KL is above its target, else smaller.

    c (1 + clip(kl / target - 1, -0.2, 0.2) num_samples / horizon) (Ziegler et al. 2019,
    arXiv:1909.08593, section 2.2); steps of more samples than the horizon count as the horizon, so
    that the coefficient never changes its sign.

    Args:
        coefficient: Coefficient of the step.
        kl: Mean estimate per token of the step, in nats.
        target: Target value of the KL.
        horizon: Number of samples over which the coefficient grows by a fifth.
        num_samples: Number of samples of the step.
    """
    error = min(max(kl / target - 1.0, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
    return coefficient * (1.0 + error * min(1.0, num_samples / horizon))
