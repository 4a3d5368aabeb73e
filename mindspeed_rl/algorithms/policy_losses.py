"""Policy losses by name: the loss of each token from its advantage and its ratio to the old policy.

Shapes: N trained tokens of one micro-batch. r = exp(log p - log p_old); with ``old_logprobs``
``None`` the ratio is 1 with the gradient of the log-prob, the on-policy case. ``sg`` stops the
gradient. Losses of a whole sequence give every token its sequence's value and its own part of the
gradient, so that the weights of ``seq-mean-token-mean`` make the loss of the source, and a
context-parallel rank needs sums of the others' tokens but no gradient through them.

A new policy loss is a function here with its declaration above it; a setting of its own is a field
of :class:`SurrogateSettings`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mindspeed_rl.algorithms.bounds import bounded
from mindspeed_rl.algorithms.catalogue import Catalogue, Choice
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.flag import flag

if TYPE_CHECKING:
    import torch

    from mindspeed_rl.algorithms.types import LossInputs


@dataclass(frozen=True, slots=True)
class SurrogateSettings:
    """Settings of the policy losses.

    Each is read by the losses that it names. r is the probability ratio of the policy to its old
    self, A the advantage.
    """

    eps_lower: float = flag(
        0.2,
        "r is clipped at 1 minus this; a limit of the divergence in dppo_tv and dppo_kl, of log r "
        "in geo_mean.",
        minimum=0.0,
        maximum=1.0,
        names=("--grpo-clamp-eps-lower",),
    )
    eps_upper: float = flag(
        0.2,
        "r is clipped at 1 plus this; the same limits above.",
        minimum=0.0,
        names=("--grpo-clamp-eps-upper",),
    )
    clip_ratio_c: float = flag(
        0.0,
        "Dual clip: where A is negative the loss is at most this times |A|; above 1, 0 is off.",
        minimum=0.0,
        names=("--rl-clip-ratio-c",),
    )
    ratio_cap: float = flag(
        20.0, "Largest r that weights a token.", minimum=1.0, names=("--rl-dppo-ratio-cap",)
    )
    sapo_tau_pos: float = flag(
        1.0, "Steepness of the gate where A is positive.", above=0.0, names=("--rl-sapo-tau-pos",)
    )
    sapo_tau_neg: float = flag(
        1.05,
        "Steepness of the gate where A is not positive.",
        above=0.0,
        names=("--rl-sapo-tau-neg",),
    )
    dro_beta: float = flag(0.05, "Weight of the penalty.", minimum=0.0, names=("--rl-dro-beta",))
    cov_ratio: float = flag(
        2e-4,
        "Share of the tokens of an optimizer step that is selected; at least one token.",
        minimum=0.0,
        maximum=1.0,
        names=("--rl-cov-ratio",),
    )
    clip_cov_lower: float = flag(
        1.0, "Smallest covariance that is selected.", names=("--rl-clip-cov-lower",)
    )
    clip_cov_upper: float = flag(
        5.0, "Largest covariance that is selected.", names=("--rl-clip-cov-upper",)
    )
    kl_cov_coef: float = flag(
        1.0,
        "Weight of |log r| at the tokens that are selected.",
        minimum=0.0,
        names=("--rl-kl-cov-coef",),
    )

    def __post_init__(self) -> None:
        if 0 < self.clip_ratio_c <= 1:
            raise UsageError(
                f"--rl-clip-ratio-c {self.clip_ratio_c:g}: must be above 1, e.g. 3, or 0 to switch "
                "the dual clip off; at 1 every negative advantage would be held back"
            )
        if self.clip_cov_lower >= self.clip_cov_upper:
            raise UsageError(
                f"--rl-clip-cov-lower {self.clip_cov_lower:g} is not below --rl-clip-cov-upper "
                f"{self.clip_cov_upper:g}: no token could be selected"
            )


@dataclass(frozen=True, slots=True)
class Surrogate:
    """The loss of each token, and where it is bounded.

    Attributes:
        loss: [N] with gradient.
        outside: [N] bool, where the loss holds the policy back: the ratio is outside its bounds.
    """

    loss: torch.Tensor
    outside: torch.Tensor


SurrogateFormula = Callable[["LossInputs", SurrogateSettings], Surrogate]
Selection = Literal["none", "random", "largest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss(Choice):
    """A policy loss.

    Attributes:
        formula: Computes the loss of each token.
        aggregation: Aggregation of the tokens in its source.
        selection: Which tokens of an optimizer step are in ``LossInputs.covariance_mask``: those of
            the largest covariance of log p and A, random ones within bounds of it, or none.
    """

    formula: SurrogateFormula
    aggregation: str = "token-mean"
    selection: Selection = "none"

    @property
    def selects(self) -> bool:
        """Whether tokens are selected over the whole optimizer step."""
        return self.selection != "none"


POLICY_LOSSES = Catalogue("--rl-policy-loss", PolicyLoss)
_CLIPPED = ("eps_lower", "eps_upper")
_BY_SEQUENCE = "seq-mean-token-mean"


def _clipped(ratio: torch.Tensor, advantages: torch.Tensor, s: SurrogateSettings) -> Surrogate:
    """Return -min(ratio A, clip(ratio) A)."""
    inside = ratio.clamp(1.0 - s.eps_lower, 1.0 + s.eps_upper)
    loss = -(ratio * advantages).minimum(inside * advantages)
    return Surrogate(loss, (ratio != inside).detach())


@POLICY_LOSSES.declare(
    "-min(r A, clip(r) A)", "arXiv:1707.06347, 1912.09729", reads=(*_CLIPPED, "clip_ratio_c")
)
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
    return Surrogate(limit.where(held, result.loss), result.outside | held)


@POLICY_LOSSES.declare(
    "ppo with r = geometric mean over the sequence, which needs far smaller bounds (its paper: "
    "3e-4 and 4e-4)",
    "arXiv:2507.18071",
    reads=_CLIPPED,
    aggregation=_BY_SEQUENCE,
)
def gspo(inputs: LossInputs, s: SurrogateSettings) -> Surrogate:
    """-min(s A, clip(s) A), s = exp(mean of log r over the sequence).

    Zheng et al. 2025, arXiv:2507.18071, in its per-token form: sg(s) p / sg(p).
    """
    sequences = inputs.sequences
    mean = sequences.spread(bounded(sequences.means(inputs.log_ratio)))
    own = inputs.logprobs - inputs.logprobs.detach()
    return _clipped((mean + own).exp(), inputs.advantages, s)


@POLICY_LOSSES.declare(
    "-A exp(mean over the sequence of clipped log r)",
    "arXiv:2507.20673",
    reads=_CLIPPED,
    aggregation=_BY_SEQUENCE,
)
def geo_mean(inputs: LossInputs, s: SurrogateSettings) -> Surrogate:
    """-A exp(mean over the sequence of clipped log r) (Zhao et al. 2025, arXiv:2507.20673).

    log r is clipped at eps_upper where A > 0 and at -eps_lower where A < 0, always against the
    direction of the update.
    """
    log_ratio, sign = inputs.log_ratio, inputs.advantages.sign()
    inside = log_ratio.clamp(-s.eps_lower, s.eps_upper)
    kept = sign * (sign * log_ratio).minimum(sign * inside)
    sequences = inputs.sequences
    mean = sequences.spread(bounded(sequences.means(kept)))
    loss = -inputs.advantages * (mean + kept - kept.detach()).exp()
    return Surrogate(loss, (log_ratio != inside).detach())


@POLICY_LOSSES.declare(
    "-sg(clip(r)) A log p, all tokens keep a gradient", "arXiv:2506.13585", reads=_CLIPPED
)
def cispo(inputs: LossInputs, s: SurrogateSettings) -> Surrogate:
    """-sg(clip(r)) A log p: every token keeps a gradient (MiniMax 2025, arXiv:2506.13585)."""
    ratio = bounded(inputs.log_ratio.detach()).exp()
    inside = ratio.clamp(1.0 - s.eps_lower, 1.0 + s.eps_upper)
    return Surrogate(-inside * inputs.advantages * inputs.logprobs, ratio != inside)


@POLICY_LOSSES.declare("-A log p, without r", "arXiv:2504.02546")
def gpg(inputs: LossInputs, s: SurrogateSettings) -> Surrogate:
    """-A log p: REINFORCE without a ratio (Chu et al. 2025, arXiv:2504.02546)."""
    return Surrogate(-inputs.advantages * inputs.logprobs, _nowhere(inputs))


@POLICY_LOSSES.declare(
    "-A (4 / tau) sigmoid(tau (r - 1)), a gate instead of a bound",
    "arXiv:2511.20347",
    reads=("sapo_tau_pos", "sapo_tau_neg"),
    aggregation=_BY_SEQUENCE,
)
def sapo(inputs: LossInputs, s: SurrogateSettings) -> Surrogate:
    """-A (4 / tau) sigmoid(tau (r - 1)): a soft clip (Gao et al. 2025, arXiv:2511.20347).

    tau is ``sapo_tau_pos`` where A > 0 and ``sapo_tau_neg`` elsewhere; the slope at r = 1 is 1.
    """
    ratio = bounded(inputs.log_ratio).exp()
    tau = ratio.new_full(ratio.shape, s.sapo_tau_neg)
    tau = tau.masked_fill(inputs.advantages > 0, s.sapo_tau_pos)
    loss = -inputs.advantages * (tau * (ratio - 1.0)).sigmoid() * 4.0 / tau
    return Surrogate(loss, _nowhere(inputs))


@POLICY_LOSSES.declare(
    "-sg(min(r, cap)) A log p, 0 where the probability moved too far",
    "arXiv:2602.04879",
    reads=(*_CLIPPED, "ratio_cap"),
)
def dppo_tv(inputs: LossInputs, s: SurrogateSettings) -> Surrogate:
    """-sg(min(r, cap)) A log p where p - p_old is within its limits, else 0.

    The binary total-variation form of Qi et al. 2026, arXiv:2602.04879: the limit is on the change
    of the probability itself. A token is held back only in the direction of its advantage.
    """
    new, old = _probabilities(inputs)
    rises = inputs.advantages > 0
    outside = (new - old > s.eps_upper).where(rises, old - new > s.eps_lower)
    return _divergence_limited(inputs, outside, s)


@POLICY_LOSSES.declare(
    "dppo_tv by the binary KL of the old and new probability",
    "arXiv:2602.04879",
    reads=(*_CLIPPED, "ratio_cap"),
)
def dppo_kl(inputs: LossInputs, s: SurrogateSettings) -> Surrogate:
    """As :func:`dppo_tv` with KL(p_old || p) of "this token or another" as the divergence."""
    new, old = _probabilities(inputs)
    tiny = 1e-8  # at probability 1 the other outcome has probability 0
    other = (1 - old) * ((1 - old + tiny) / (1 - new + tiny)).log()
    divergence = other - old * bounded(inputs.log_ratio.detach())
    rises = inputs.advantages > 0
    too_high = (new > old) & (divergence > s.eps_upper)
    outside = too_high.where(rises, (new < old) & (divergence > s.eps_lower))
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


@POLICY_LOSSES.declare("-A log p + beta / 2 (log r)^2", "arXiv:2405.19107", reads=("dro_beta",))
def dro(inputs: LossInputs, s: SurrogateSettings) -> Surrogate:
    """-(A log p - beta / 2 (log r)^2) (Richemond et al. 2024, arXiv:2405.19107)."""
    log_ratio = inputs.log_ratio
    loss = 0.5 * s.dro_beta * log_ratio.square() - inputs.advantages * inputs.logprobs
    return Surrogate(loss, _nowhere(inputs))


@POLICY_LOSSES.declare(
    "ppo without some tokens of high covariance of log p and A",
    "arXiv:2505.22617",
    reads=(*_CLIPPED, "clip_ratio_c", "cov_ratio", "clip_cov_lower", "clip_cov_upper"),
    selection="random",
)
def clip_cov(inputs: LossInputs, s: SurrogateSettings) -> Surrogate:
    """Drop the selected tokens from :func:`ppo` (Cui et al. 2025, arXiv:2505.22617).

    Some tokens whose log-prob and advantage covary strongly are selected: they cost most entropy.
    """
    base, selected = ppo(inputs, s), _selected(inputs)
    return Surrogate(base.loss.masked_fill(selected, 0.0), base.outside | selected)


@POLICY_LOSSES.declare(
    "-r A, plus |log r| at the tokens of highest covariance",
    "arXiv:2505.22617",
    reads=("cov_ratio", "kl_cov_coef"),
    selection="largest",
)
def kl_cov(inputs: LossInputs, s: SurrogateSettings) -> Surrogate:
    """-r A, plus coef |log r| at the selected tokens (Cui et al. 2025, arXiv:2505.22617)."""
    log_ratio, selected = bounded(inputs.log_ratio), _selected(inputs)
    penalty = s.kl_cov_coef * log_ratio.abs() * selected
    return Surrogate(penalty - log_ratio.exp() * inputs.advantages, selected)


def _selected(inputs: LossInputs) -> torch.Tensor:
    assert inputs.covariance_mask is not None, "no tokens were selected for this step"
    return inputs.covariance_mask


def _nowhere(inputs: LossInputs) -> torch.Tensor:
    return inputs.advantages.new_zeros(inputs.advantages.shape).bool()
