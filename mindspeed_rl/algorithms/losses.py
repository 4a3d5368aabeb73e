"""Policy losses: one micro-batch in, its share of the global loss out.

Shapes: N trained tokens of one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mindspeed_rl.algorithms.types import (
    Denominators,
    LossInputs,
    LossOutputs,
    MaxTerm,
    MeanTerm,
    Term,
)

# exp() of a larger log-ratio overflows fp32 long after the clip has made it irrelevant.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class ClipSettings:
    """Settings of the clipped policy loss.

    Attributes:
        eps_lower: the ratio is clipped at 1 - eps_lower.
        eps_upper: the ratio is clipped at 1 + eps_upper.
        kl_beta: weight of the k3 KL term against the reference.
        entropy_weight: weight of the entropy bonus.
    """

    eps_lower: float = 0.2
    eps_upper: float = 0.2
    kl_beta: float = 0.0
    entropy_weight: float = 0.0


def supervised_loss(inputs: LossInputs, denominators: Denominators) -> LossOutputs:
    """Mean negative log-likelihood of the trained tokens."""
    loss = -inputs.logprobs.sum() / denominators.tokens
    count = _count(inputs.logprobs)
    return LossOutputs(loss, {"loss": MeanTerm(-inputs.logprobs.detach().sum(), count)})


def clipped_policy_loss(
    inputs: LossInputs, settings: ClipSettings, denominators: Denominators
) -> LossOutputs:
    """Token-mean of -min(r A, clip(r, 1 - eps_lower, 1 + eps_upper) A).

    r = exp(log p - log p_old) (Schulman et al. 2017, arXiv:1707.06347); the bounds may differ
    (Yu et al. 2025, arXiv:2503.14476). With ``old_logprobs`` ``None`` the ratio is 1 with the
    gradient of the log-prob, which is the on-policy case. KL is k3: exp(d) - d - 1 with
    d = log p_ref - log p (http://joschu.net/blog/kl-approx.html).
    """
    logprobs = inputs.logprobs
    old = logprobs.detach() if inputs.old_logprobs is None else inputs.old_logprobs
    log_ratio = (logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - settings.eps_lower, 1.0 + settings.eps_upper)
    policy = -torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages)
    total = policy.sum()
    count = _count(logprobs)
    terms: dict[str, Term] = {
        "loss/policy": MeanTerm(policy.detach().sum(), count),
        "policy/entropy": MeanTerm(inputs.entropy.detach().sum(), count),
        "policy/clip_fraction": MeanTerm((ratio != clipped).sum().float(), count),
        "policy/ratio_max_deviation": _max((ratio.detach() - 1.0).abs()),
    }
    if settings.kl_beta:
        if inputs.ref_logprobs is None:
            raise RuntimeError("kl_beta is set but there are no reference log-probs")
        difference = (inputs.ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        kl = difference.exp() - difference - 1.0
        total = total + settings.kl_beta * kl.sum()
        terms["loss/kl"] = MeanTerm(kl.detach().sum(), count)
    if settings.entropy_weight:
        total = total - settings.entropy_weight * inputs.entropy.sum()
    return LossOutputs(total / denominators.tokens, terms)


def mismatch_terms(trainer: torch.Tensor, engine: torch.Tensor) -> dict[str, Term]:
    """How far the engine's log-probs are from the trainer's on the sampled tokens (R14).

    Both must be of the weights that sampled: after an update the difference is learning.
    ``mismatch/k3`` estimates KL(engine || trainer) per token.
    """
    difference = trainer - engine
    count = _count(difference)
    bounded = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "mismatch/max_abs_logprob": _max(difference.abs()),
        "mismatch/mean_abs_logprob": MeanTerm(difference.abs().sum(), count),
        "mismatch/k3": MeanTerm((bounded.exp() - bounded - 1.0).sum(), count),
    }


def _count(values: torch.Tensor) -> torch.Tensor:
    return torch.tensor(float(values.numel()), device=values.device)


def _max(values: torch.Tensor) -> MaxTerm:
    if values.numel() == 0:
        return MaxTerm(torch.tensor(float("-inf"), device=values.device))
    return MaxTerm(values.max())
