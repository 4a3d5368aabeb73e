"""Policy losses per token, by name: how the ratio to the old policy and the advantage make a loss.

Shapes: N trained tokens of one micro-batch. r = exp(log p - log p_old); with ``old_logprobs``
``None`` the ratio is 1 with the gradient of the log-prob, the on-policy case. ``sg`` stops the
gradient. Losses of a whole sequence give every token its sequence's value and its own share of the
gradient, so that the weights of ``seq-mean-token-mean`` make the loss of the source, and a
context-parallel rank needs sums of the others' tokens but no gradient through them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from mindspeed_rl.algorithms.bounds import bounded
from mindspeed_rl.algorithms.types import LossInputs


@dataclass(frozen=True, slots=True)
class SurrogateSettings:
    """Settings of the policy losses; each reads its own.

    Attributes:
        eps_lower: ratios are clipped at 1 - eps_lower; a divergence limit in DPPO, a limit of the
            log-ratio in geo_mean.
        eps_upper: the same above.
        clip_ratio_c: dual clip of ppo: the loss of a negative advantage is at most c |A|; 0 is off.
        ratio_cap: largest ratio that weights a token in DPPO.
        sapo_tau_pos: temperature of the gate where the advantage is positive.
        sapo_tau_neg: the same where it is not.
        dro_beta: weight of the squared log-ratio in DRO.
        kl_cov_coef: weight of the penalty at tokens selected by kl_cov.
    """

    eps_lower: float = 0.2
    eps_upper: float = 0.2
    clip_ratio_c: float = 0.0
    ratio_cap: float = 20.0
    sapo_tau_pos: float = 1.0
    sapo_tau_neg: float = 1.05
    dro_beta: float = 0.05
    kl_cov_coef: float = 1.0


@dataclass(frozen=True, slots=True)
class Surrogate:
    """What a policy loss says of each token.

    Attributes:
        loss: [N] with gradient.
        outside: [N] bool, where the loss holds the policy back: the ratio is outside its bounds.
    """

    loss: torch.Tensor
    outside: torch.Tensor


def _clipped(ratio: torch.Tensor, advantages: torch.Tensor, s: SurrogateSettings) -> Surrogate:
    """-min(ratio A, clip(ratio) A)."""
    inside = ratio.clamp(1.0 - s.eps_lower, 1.0 + s.eps_upper)
    loss = -torch.minimum(ratio * advantages, inside * advantages)
    return Surrogate(loss, (ratio != inside).detach())


def ppo(inputs: LossInputs, s: SurrogateSettings) -> Surrogate:
    """-min(r A, clip(r, 1 - eps_lower, 1 + eps_upper) A).

    Schulman et al. 2017, arXiv:1707.06347; two bounds: Yu et al. 2025, arXiv:2503.14476. With
    ``clip_ratio_c`` the loss of A < 0 is at most -c A (Ye et al. 2019, arXiv:1912.09729).
    """
    result = _clipped(bounded(inputs.log_ratio).exp(), inputs.advantages, s)
    if not s.clip_ratio_c:
        return result
    limit = -s.clip_ratio_c * inputs.advantages
    held = (inputs.advantages < 0) & (result.loss > limit)
    return Surrogate(torch.where(held, limit, result.loss), result.outside | held)


def gspo(inputs: LossInputs, s: SurrogateSettings) -> Surrogate:
    """-min(s A, clip(s) A), s = exp(mean of log r over the sequence).

    Zheng et al. 2025, arXiv:2507.18071, in its per-token form: sg(s) p / sg(p).
    """
    sequences = inputs.sequences
    mean = sequences.spread(bounded(sequences.means(inputs.log_ratio)))
    own = inputs.logprobs - inputs.logprobs.detach()
    return _clipped((mean + own).exp(), inputs.advantages, s)


def geo_mean(inputs: LossInputs, s: SurrogateSettings) -> Surrogate:
    """-A exp(mean over the sequence of clipped log r) (Zhao et al. 2025, arXiv:2507.20673).

    log r is clipped at eps_upper where A > 0 and at -eps_lower where A < 0, always against the
    direction of the update.
    """
    log_ratio, sign = inputs.log_ratio, inputs.advantages.sign()
    inside = log_ratio.clamp(-s.eps_lower, s.eps_upper)
    kept = sign * torch.minimum(sign * log_ratio, sign * inside)
    sequences = inputs.sequences
    mean = sequences.spread(bounded(sequences.means(kept)))
    loss = -inputs.advantages * (mean + kept - kept.detach()).exp()
    return Surrogate(loss, (log_ratio != inside).detach())


def cispo(inputs: LossInputs, s: SurrogateSettings) -> Surrogate:
    """-sg(clip(r)) A log p: every token keeps a gradient (MiniMax 2025, arXiv:2506.13585)."""
    ratio = bounded(inputs.log_ratio.detach()).exp()
    inside = ratio.clamp(1.0 - s.eps_lower, 1.0 + s.eps_upper)
    return Surrogate(-inside * inputs.advantages * inputs.logprobs, ratio != inside)


def gpg(inputs: LossInputs, s: SurrogateSettings) -> Surrogate:
    """-A log p: REINFORCE without a ratio (Chu et al. 2025, arXiv:2504.02546)."""
    loss = -inputs.advantages * inputs.logprobs
    return Surrogate(loss, torch.zeros_like(loss, dtype=torch.bool))


def sapo(inputs: LossInputs, s: SurrogateSettings) -> Surrogate:
    """-A (4 / tau) sigmoid(tau (r - 1)): a soft clip (Gao et al. 2025, arXiv:2511.20347).

    tau is ``sapo_tau_pos`` where A > 0 and ``sapo_tau_neg`` elsewhere; the slope at r = 1 is 1.
    """
    ratio = bounded(inputs.log_ratio).exp()
    tau = torch.full_like(ratio, s.sapo_tau_neg)
    tau[inputs.advantages > 0] = s.sapo_tau_pos
    loss = -inputs.advantages * (tau * (ratio - 1.0)).sigmoid() * 4.0 / tau
    return Surrogate(loss, torch.zeros_like(loss, dtype=torch.bool))


def dppo_tv(inputs: LossInputs, s: SurrogateSettings) -> Surrogate:
    """-sg(min(r, cap)) A log p where p - p_old is within its limits, else 0.

    The binary total-variation form of Qi et al. 2026, arXiv:2602.04879: the limit is on the change
    of the probability itself. A token is held back only in the direction of its advantage.
    """
    new, old = _probabilities(inputs)
    rises = inputs.advantages > 0
    outside = torch.where(rises, new - old > s.eps_upper, old - new > s.eps_lower)
    return _divergence_limited(inputs, outside, s)


def dppo_kl(inputs: LossInputs, s: SurrogateSettings) -> Surrogate:
    """As :func:`dppo_tv` with KL(p_old || p) of "this token or another" as the divergence."""
    new, old = _probabilities(inputs)
    tiny = 1e-8  # of probability 1: the other outcome has none left
    other = (1 - old) * ((1 - old + tiny) / (1 - new + tiny)).log()
    divergence = other - old * bounded(inputs.log_ratio.detach())
    rises = inputs.advantages > 0
    outside = torch.where(
        rises,
        (new > old) & (divergence > s.eps_upper),
        (new < old) & (divergence > s.eps_lower),
    )
    return _divergence_limited(inputs, outside, s)


def _probabilities(inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
    new = inputs.logprobs.detach()
    return new.exp(), (new - inputs.log_ratio.detach()).exp()


def _divergence_limited(
    inputs: LossInputs, outside: torch.Tensor, s: SurrogateSettings
) -> Surrogate:
    ratio = bounded(inputs.log_ratio.detach()).exp().clamp(max=s.ratio_cap)
    loss = -ratio * inputs.advantages * inputs.logprobs
    return Surrogate(loss.masked_fill(outside, 0.0), outside)


def dro(inputs: LossInputs, s: SurrogateSettings) -> Surrogate:
    """-(A log p - beta / 2 (log r)^2) (Richemond et al. 2024, arXiv:2405.19107)."""
    log_ratio = inputs.log_ratio
    loss = 0.5 * s.dro_beta * log_ratio.square() - inputs.advantages * inputs.logprobs
    return Surrogate(loss, torch.zeros_like(loss, dtype=torch.bool))


def clip_cov(inputs: LossInputs, s: SurrogateSettings) -> Surrogate:
    """:func:`ppo` without the selected tokens (Cui et al. 2025, arXiv:2505.22617).

    Selected are some tokens whose log-prob and advantage covary strongly: they cost most entropy.
    """
    base, selected = ppo(inputs, s), _selected(inputs)
    return Surrogate(base.loss.masked_fill(selected, 0.0), base.outside | selected)


def kl_cov(inputs: LossInputs, s: SurrogateSettings) -> Surrogate:
    """-r A, plus coef |log r| at the selected tokens (Cui et al. 2025, arXiv:2505.22617)."""
    log_ratio, selected = bounded(inputs.log_ratio), _selected(inputs)
    penalty = s.kl_cov_coef * log_ratio.abs() * selected
    return Surrogate(penalty - log_ratio.exp() * inputs.advantages, selected)


def _selected(inputs: LossInputs) -> torch.Tensor:
    if inputs.covariance_mask is None:
        raise RuntimeError("no tokens were selected for this step")
    return inputs.covariance_mask


PolicyLoss = Callable[[LossInputs, SurrogateSettings], Surrogate]

POLICY_LOSSES: Mapping[str, PolicyLoss] = {
    "ppo": ppo,
    "gspo": gspo,
    "geo_mean": geo_mean,
    "cispo": cispo,
    "gpg": gpg,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dro": dro,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}
"""By the name of ``--rl-policy-loss``."""
