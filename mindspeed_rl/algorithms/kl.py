"""Estimators of KL(policy || reference) from the sampled tokens alone, and their coefficient.

Shapes: N trained tokens; d = log p - log p_ref. k1, k2, k3: http://joschu.net/blog/kl-approx.html.

A new estimator is a function here with its declaration above it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mindspeed_rl.algorithms.bounds import bounded
from mindspeed_rl.algorithms.catalogue import Catalogue, Choice

if TYPE_CHECKING:
    import torch

STRAIGHT_THROUGH = "+"
OfDifference = Callable[["torch.Tensor"], "torch.Tensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KLEstimator(Choice):
    """An estimator of the KL of a token.

    Attributes:
        of: the estimate, [N] in nats, of d, [N].
        in_loss_only: it differs from another one in its gradient alone.
    """

    of: OfDifference
    in_loss_only: bool = False


KL_ESTIMATORS: Catalogue[KLEstimator] = Catalogue("--rl-kl-estimator")


def _kl_estimator(name: str, summary: str) -> Callable[[OfDifference], OfDifference]:
    """Declare a function as an estimator."""

    def declare(function: OfDifference) -> OfDifference:
        KL_ESTIMATORS.add(KLEstimator(name=name, summary=summary, of=function))
        return function

    return declare


@_kl_estimator("k1", "d, unbiased, of either sign; its gradient is 0 on average")
def _k1(difference: torch.Tensor) -> torch.Tensor:
    return difference


@_kl_estimator("abs", "|d|")
def _magnitude(difference: torch.Tensor) -> torch.Tensor:
    return difference.abs()


@_kl_estimator("k2", "d^2 / 2, whose gradient is that of the KL on average")
def _k2(difference: torch.Tensor) -> torch.Tensor:
    return 0.5 * difference.square()


@_kl_estimator("k3", "exp(-d) + d - 1, unbiased and never negative; its gradient is biased")
def _k3(difference: torch.Tensor) -> torch.Tensor:
    difference = bounded(difference)
    return (-difference).exp() + difference - 1.0


def _straight_through(estimator: KLEstimator) -> KLEstimator:
    """The value of an estimator with the gradient of k2 (Liu et al. 2025, arXiv:2510.01555)."""

    def value(difference: torch.Tensor) -> torch.Tensor:
        squared = _k2(difference)
        return squared - squared.detach() + estimator.of(difference).detach()

    return KLEstimator(
        name=estimator.name + STRAIGHT_THROUGH,
        summary=f"the value of {estimator.name} with the gradient of k2",
        source="arXiv:2510.01555",
        of=value,
        in_loss_only=True,
    )


for _estimator in [e for e in KL_ESTIMATORS.values() if e.of is not _k2]:
    KL_ESTIMATORS.add(_straight_through(_estimator))


def kl_estimate(logprobs: torch.Tensor, reference: torch.Tensor, estimator: str) -> torch.Tensor:
    """KL(policy || reference) per token; log-ratios are within +-20 nats.

    Args:
        logprobs: [N], of the policy, with or without gradient.
        reference: [N], of the reference.
        estimator: a name of :data:`KL_ESTIMATORS`.

    Returns:
        [N] in nats.
    """
    return KL_ESTIMATORS[estimator].of(bounded(logprobs - reference))


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
