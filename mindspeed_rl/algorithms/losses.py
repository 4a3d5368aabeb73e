"""Computes the loss of one micro-batch: its part of the sum that is the global loss.

Shapes: N trained tokens of one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from mindspeed_rl.algorithms.aggregation import token_weights
from mindspeed_rl.algorithms.bounds import bounded
from mindspeed_rl.algorithms.correction import Correction, CorrectionSettings, correct
from mindspeed_rl.algorithms.distillation import teacher_gain
from mindspeed_rl.algorithms.kl import kl_estimate
from mindspeed_rl.algorithms.policy_losses import POLICY_LOSSES, SurrogateSettings
from mindspeed_rl.algorithms.types import (
    Denominators,
    LossInputs,
    LossOutputs,
    MaxTerm,
    MeanTerm,
    Term,
)

TEACHER_KL = "distillation/reverse_kl"  # per token, in nats


@dataclass(frozen=True, slots=True)
class LossSettings:
    """Settings of all parts of a policy's loss.

    Attributes:
        policy_loss: A name of :data:`POLICY_LOSSES`.
        surrogate: Settings of the policy loss.
        aggregation: Weights of the tokens, see :func:`token_weights`.
        longest: Limit on the length of a response, in tokens.
        kl_beta: Weight of the KL term against the reference; 0 where it is in the reward.
        kl_estimator: Estimator of the KL, see :func:`kl_estimate`.
        entropy_weight: Weight of the entropy bonus.
        correction: Correction of the difference to the engine.
        teacher_weight: Weight of the teachers' gain in an advantage; 0 without it.
        teacher_kl_weight: Weight of the KL to the teachers over the whole vocabulary; 0 without it.
    """

    policy_loss: str = "ppo"
    surrogate: SurrogateSettings = field(default_factory=SurrogateSettings)
    aggregation: str = "token-mean"
    longest: int = 1
    kl_beta: float = 0.0
    kl_estimator: str = "k3"
    entropy_weight: float = 0.0
    correction: CorrectionSettings = field(default_factory=CorrectionSettings)
    teacher_weight: float = 0.0
    teacher_kl_weight: float = 0.0


def supervised_loss(inputs: LossInputs, num_tokens: int) -> LossOutputs:
    """Return the negative log-likelihood, averaged over the ``num_tokens`` tokens of the step."""
    loss = -inputs.logprobs.sum() / num_tokens
    count = _count(inputs.logprobs)
    return LossOutputs(loss, {"loss": MeanTerm(-inputs.logprobs.detach().sum(), count)})


def policy_loss(
    inputs: LossInputs, settings: LossSettings, denominators: Denominators
) -> LossOutputs:
    """Return the corrected policy loss, plus the KL to the reference, less the entropy bonus.

    The three share the weights of the aggregation; the correction weights the policy loss alone. It
    compares the engine with the old log-probs, which must be the trainer's then. ``loss/policy`` is
    the aggregated policy loss, averaged over optimizer steps; the other means are over tokens.
    """
    logprobs = inputs.logprobs
    inputs, taught = _with_teacher(inputs, settings.teacher_weight)
    weights = token_weights(
        settings.aggregation, inputs.sequences, denominators, settings.longest
    ).to(logprobs.dtype)
    surrogate = POLICY_LOSSES[settings.policy_loss].formula(inputs, settings.surrogate)
    correction = _correction(inputs, settings.correction)
    policy = surrogate.loss * correction.weights * weights
    total = policy.sum()
    count = _count(logprobs)
    deviation = (bounded(inputs.log_ratio.detach()).exp() - 1.0).abs()
    terms: dict[str, Term] = {
        "loss/policy": MeanTerm(total.detach(), count / max(1, denominators.tokens)),
        "policy/entropy": MeanTerm(inputs.entropy.detach().sum(), count),
        "policy/clip_fraction": MeanTerm(surrogate.outside.sum().to(count), count),
        "policy/ratio_max_deviation": MaxTerm.of(deviation),
        **correction.terms,
        **taught,
    }
    if settings.kl_beta:
        assert inputs.ref_logprobs is not None
        kl = kl_estimate(logprobs, inputs.ref_logprobs, settings.kl_estimator)
        total = total + settings.kl_beta * (kl * weights).sum()
        terms["loss/kl"] = MeanTerm(kl.detach().sum(), count)
    if settings.teacher_kl_weight:
        assert inputs.teacher_kl is not None
        total = total + settings.teacher_kl_weight * (inputs.teacher_kl * weights).sum()
        terms[TEACHER_KL] = MeanTerm(inputs.teacher_kl.detach().sum(), count)
    if settings.entropy_weight:
        total = total - settings.entropy_weight * (inputs.entropy * weights).sum()
    return LossOutputs(total, terms)


def _with_teacher(inputs: LossInputs, weight: float) -> tuple[LossInputs, dict[str, Term]]:
    """Add what the teachers say to the advantages; return also the mean of it, over its tokens.

    The policy's part are the old log-probs, or the present ones where those are the old ones, so
    that teachers need no pass of the policy before the update.
    """
    if not weight:
        return inputs, {}
    assert inputs.teacher_logprobs is not None
    old = inputs.logprobs.detach() if inputs.old_logprobs is None else inputs.old_logprobs
    gain = teacher_gain(old, inputs.teacher_logprobs)
    known = (~inputs.teacher_logprobs.isnan()).sum().to(gain)
    terms: dict[str, Term] = {TEACHER_KL: MeanTerm(-gain.sum(), known)}
    return replace(inputs, advantages=inputs.advantages + weight * gain), terms


def _correction(inputs: LossInputs, settings: CorrectionSettings) -> Correction:
    if not settings.active:
        return Correction(torch.ones_like(inputs.advantages), {})
    trainer = inputs.logprobs if inputs.old_logprobs is None else inputs.old_logprobs
    return correct(trainer, inputs.rollout_logprobs, inputs.sequences, settings)


def _count(values: torch.Tensor) -> torch.Tensor:
    return values.new_tensor(float(values.numel()))
