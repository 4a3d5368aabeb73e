"""Corrects the loss for the difference between the engine that samples and the trainer.

Shapes: N trained tokens and S sequences of one micro-batch. rho = p_trainer / p_engine at the
weights that sampled, over one token, over a sequence (product of its tokens) or its geometric mean.
Weights multiply the policy loss of each token; a weight of 0 leaves the token in all denominators.
Sources: truncated weights, Yao et al. 2025 (fengyao.notion.site/off-policy-rl) after Espeholt et
al. 2018, arXiv:1802.01561; masking (IcePop), Ling team 2025, arXiv:2510.18855; sequences, Liu et
al. 2025 (richardli.xyz/rl-collapse).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mindspeed_rl.algorithms.bounds import bounded
from mindspeed_rl.algorithms.kl import KL_ESTIMATORS, k3
from mindspeed_rl.algorithms.types import MaxTerm, MeanTerm, Sequences, Term
from mindspeed_rl.core.flag import Needs, flag

if TYPE_CHECKING:
    import torch


CORRECTION_LEVELS = ("token", "sequence", "geometric")
_REJECTIONS = ("k1", "k2", "k3")
_WITH_WEIGHTS = Needs("--rl-inference-logprobs-is-correction")
_WITH_REJECTION = Needs("--rl-rejection", _REJECTIONS)


@dataclass(frozen=True, slots=True)
class CorrectionSettings:
    """Correction of the rollout mismatch.

    Engine and trainer give a sampled token slightly different probabilities; rho is the trainer's
    over the engine's at the weights that sampled, of a token, of a sequence (product over its
    tokens) or its geometric mean. The policy loss of a token can be weighted by min(rho, bound)
    (truncate) or by rho where it is within both bounds and 0 elsewhere (mask, known as IcePop).
    Independently, what diverges too far can be rejected. A token of weight 0 stays in the
    denominators of the loss. mismatch/* in the metrics says how large rho gets, and is reported
    without any correction as well.

    Example: --rl-inference-logprobs-is-correction --rl-importance-sampling-truncation-coef 2
    """

    weighted: bool = flag(
        False,
        "Weight the policy loss by the importance ratio of the trainer to the engine.",
        names=("--rl-inference-logprobs-is-correction",),
    )
    mode: str = flag(
        "truncate",
        "What happens to ratios out of bounds.",
        choices=("truncate", "mask"),
        names=("--rl-is-correction-mode",),
        needs=_WITH_WEIGHTS,
    )
    level: str = flag(
        "token",
        "What the ratio is taken over.",
        choices=CORRECTION_LEVELS,
        names=("--rl-is-correction-level",),
        needs=_WITH_WEIGHTS,
    )
    upper: float = flag(
        2.0,
        "Upper bound of the ratio; 1 is that of an engine that equals the trainer.",
        minimum=1.0,
        names=("--rl-importance-sampling-truncation-coef",),
        needs=_WITH_WEIGHTS,
    )
    lower: float = flag(
        0.5,
        "Lower bound of the ratio.",
        minimum=0.0,
        maximum=1.0,
        names=("--rl-is-correction-lower",),
        needs=Needs("--rl-is-correction-mode", ("mask",)),
    )
    rejection: str = flag(
        "none",
        "Drop what diverges by this estimator of KL(engine || trainer).",
        choices=("none", *_REJECTIONS),
        names=("--rl-rejection",),
    )
    rejection_level: str = flag(
        "sequence",
        "token: single tokens; sequence: whole sequences by the sum over their tokens; geometric: "
        "by the mean.",
        choices=CORRECTION_LEVELS,
        names=("--rl-rejection-level",),
        needs=_WITH_REJECTION,
    )
    rejection_threshold: float = flag(
        0.1,
        "Largest divergence that is kept, in nats; of k1, its magnitude.",
        minimum=0.0,
        names=("--rl-rejection-threshold",),
        needs=_WITH_REJECTION,
    )

    @property
    def active(self) -> bool:
        """Whether tokens are weighted or rejected."""
        return self.weighted or self.rejection != "none"


@dataclass(frozen=True, slots=True)
class Correction:
    """Weights of the policy loss, [N] without gradient, and the terms to report."""

    weights: torch.Tensor
    terms: Mapping[str, Term]


def correct(
    trainer: torch.Tensor, engine: torch.Tensor, sequences: Sequences, settings: CorrectionSettings
) -> Correction:
    """Return the weights of the trained tokens. Collective as ``sequences.reduce``.

    Args:
        trainer: [N] log-probs of the trainer at the weights that sampled.
        engine: [N] log-probs of the engine.
        sequences: Sequence of each token.
        settings: How to correct.
    """
    log_rho = trainer.detach() - engine
    weights = log_rho.new_ones(log_rho.shape)
    terms: dict[str, Term] = {}
    count = log_rho.new_tensor(float(log_rho.numel()))
    if settings.weighted:
        rho = bounded(_over(log_rho, sequences, settings.level)).exp()
        weights = rho.clamp(max=settings.upper)
        bent = rho > settings.upper
        if settings.mode == "mask":
            bent = bent | (rho < settings.lower)
            weights = rho.masked_fill(bent, 0.0)
        terms["correction/bounded_fraction"] = MeanTerm(bent.sum().to(count), count)
    if settings.rejection != "none":
        estimate = KL_ESTIMATORS[settings.rejection].formula(-log_rho)  # KL(engine || trainer)
        divergence = _over(estimate, sequences, settings.rejection_level)
        # Written so that NaN is rejected, too.
        rejected = ~(divergence.abs() <= settings.rejection_threshold)
        weights = weights.masked_fill(rejected, 0.0)
        terms["correction/rejected_fraction"] = MeanTerm(rejected.sum().to(count), count)
    terms["correction/weight"] = MeanTerm(weights.sum(), count)
    return Correction(weights, terms)


def _over(values: torch.Tensor, sequences: Sequences, level: str) -> torch.Tensor:
    """Return [N] -> [N]: each token's own value, or the sum or mean over its sequence."""
    if level == "token":
        return values
    whole = sequences.sums(values) if level == "sequence" else sequences.means(values)
    return sequences.spread(whole)


def mismatch_terms(
    trainer: torch.Tensor, engine: torch.Tensor, counted: torch.Tensor | None = None
) -> dict[str, Term]:
    """Return how far the engine's log-probs are from the trainer's on the sampled tokens.

    Both must be of the weights that sampled: after an update the difference is learning. k1 and k3
    estimate KL(engine || trainer) per token, chi2 is the mean of rho^2 - 1, and the two negative
    log-likelihoods are the logarithms of the perplexities.

    Args:
        trainer: [N] log-probs of the trainer.
        engine: [N] log-probs of the engine.
        counted: [N] bool, the tokens that those weights sampled; ``None``: all of them.
    """
    difference = trainer - engine
    count = difference.new_full((), float(difference.numel()))
    if counted is not None:
        count = counted.sum().to(count)
    rho = bounded(difference).exp()

    def only_counted(values: torch.Tensor, otherwise: float) -> torch.Tensor:
        return values if counted is None else values.masked_fill(~counted, otherwise)

    def mean(values: torch.Tensor) -> MeanTerm:
        return MeanTerm(only_counted(values, 0.0).sum(), count)

    return {
        "mismatch/max_abs_logprob": MaxTerm.of(only_counted(difference.abs(), -math.inf)),
        "mismatch/mean_abs_logprob": mean(difference.abs()),
        "mismatch/k1": mean(-difference),
        "mismatch/k3": mean(k3(-difference)),
        "mismatch/chi2": mean(rho.square() - 1.0),
        "mismatch/ratio": mean(rho),
        "mismatch/trainer_nll": mean(-trainer),
        "mismatch/engine_nll": mean(-engine),
    }


def derived_mismatch(values: Mapping[str, float]) -> dict[str, float]:
    """Derive metrics from the reduced means of :func:`mismatch_terms`.

    ``ess``: effective sample size as a fraction of the tokens, (mean rho)^2 / mean rho^2 (Kish
    1965). ``*_ppl``: perplexities.
    """
    chi2 = values.get("mismatch/chi2", math.nan)
    if math.isnan(chi2):
        return {}
    return {
        "mismatch/ess": values["mismatch/ratio"] ** 2 / (chi2 + 1.0),
        "mismatch/trainer_ppl": math.exp(values["mismatch/trainer_nll"]),
        "mismatch/engine_ppl": math.exp(values["mismatch/engine_nll"]),
    }
