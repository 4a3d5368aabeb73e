"""Advantage estimators: how the rewards of a step become the advantages of its samples or tokens.

Shapes: G groups (prompts) of n samples each; N trained tokens of whole sequences.

An estimator gives every sample a value that is relative to its group or to a baseline of its
prompt. That is the advantage of all its tokens, or, where tokens differ, a reward at its last token
from which the estimator computes token advantages. An abstained reward (NaN) has the value 0 and is
kept out of all baselines. A group whose rewards are all equal teaches nothing: where the baseline
is the group's own, its values are exactly 0, also when rounding makes the rewards differ from their
mean.

A new estimator is a function here with its declaration above it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mindspeed_rl.algorithms.bounds import MIN_STD
from mindspeed_rl.algorithms.catalogue import Catalogue, Choice
from mindspeed_rl.core.flag import flag

if TYPE_CHECKING:
    import torch

    from mindspeed_rl.algorithms.token_advantages import ValueTargets


@dataclass(frozen=True, slots=True)
class AdvantageSettings:
    """Settings of the advantage estimators.

    Each is read by the estimators that it names.
    """

    gamma: float = flag(
        1.0,
        "Discount of the reward per token back from the end.",
        minimum=0.0,
        maximum=1.0,
        names=("--rl-gamma", "--gae-gamma"),
    )
    gae_lambda: float = flag(
        1.0,
        "Decay of later errors of the critic in an advantage: 1 is the return less the value, 0 "
        "the error of one token.",
        minimum=0.0,
        maximum=1.0,
    )
    no_std_normalization: bool = flag(
        False,
        "Do not divide by the standard deviation of the group, as dr_grpo does.",
        names=("--grpo-no-std-normalization",),
    )


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """What an estimator knows about the samples of a step; the same on all ranks.

    Attributes:
        rewards: [G, n] rewards, NaN where one abstained.
        lengths: [G, n] number of tokens of each response.
        greedy: [G] rewards of the greedy responses, NaN where one abstained; ``None`` unless the
            estimator asks for them.
    """

    rewards: torch.Tensor
    lengths: torch.Tensor
    greedy: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class TokenRewards:
    """What an estimator knows about the tokens of a micro-batch.

    Attributes:
        rewards: [N], the value of each sample at its last token, less the KL of each token where
            the KL is in the reward.
        lengths: Number of trained tokens of each sequence; they add up to N.
        values: [N] values of the critic, without gradient; ``None`` unless asked for.
    """

    rewards: torch.Tensor
    lengths: Sequence[int]
    values: torch.Tensor | None = None


OfSamples = Callable[[GroupRewards, AdvantageSettings], "torch.Tensor"]
TokenEstimator = Callable[[TokenRewards, AdvantageSettings], "ValueTargets"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator(Choice):
    """An advantage estimator.

    Attributes:
        formula: Computes the value of each sample, [G, n] of the rewards' type.
        of_tokens: Computes the advantages of tokens and the targets of a critic; ``None``: every
            token has the value of its sample.
        min_group_size: Smallest n that has a signal.
        whiten: Whether to whiten the advantages over the trained tokens of the step.
        needs_greedy: Whether :attr:`GroupRewards.greedy` must be given.
        needs_critic: Whether :attr:`TokenRewards.values` must be given.
    """

    formula: OfSamples
    of_tokens: TokenEstimator | None = None
    min_group_size: int = 2
    whiten: bool = False
    needs_greedy: bool = False
    needs_critic: bool = False


ESTIMATORS = Catalogue("--rl-advantage-estimator", Estimator)


@dataclass(frozen=True, slots=True)
class _RewardGroup:
    """Statistics of each group over its known rewards, all [G, n] or [G, 1]."""

    known: torch.Tensor
    count: torch.Tensor
    centred: torch.Tensor
    std: torch.Tensor
    degenerate: torch.Tensor


def _statistics(rewards: torch.Tensor) -> _RewardGroup:
    """Compute mean and unbiased deviation in two fp64 passes; equal rewards have deviation 0."""
    dtype, rewards = rewards.dtype, rewards.double()
    known = ~rewards.isnan()
    count = known.sum(1, keepdim=True)
    values = rewards.masked_fill(~known, 0.0)
    mean = values.sum(1, keepdim=True) / count.clamp(min=1)
    centred = (values - mean).masked_fill(~known, 0.0)
    std = (centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    degenerate = (std < MIN_STD) | (count < 2)
    return _RewardGroup(known, count, centred.to(dtype), std.to(dtype), degenerate)


def teaches(rewards: torch.Tensor) -> torch.Tensor:
    """Return which groups have rewards that differ: [G, n] -> [G] bool."""
    return ~_statistics(rewards).degenerate[:, 0]


@ESTIMATORS.declare(
    "(r - mean) / (standard deviation + 1e-4) of the group",
    "arXiv:2402.03300",
    reads=("no_std_normalization",),
)
def grpo(step: GroupRewards, settings: AdvantageSettings) -> torch.Tensor:
    """A = (r - mean) / (std + 1e-4) of the group (Shao et al. 2024)."""
    if settings.no_std_normalization:
        return dr_grpo(step, settings)
    group = _statistics(step.rewards)
    return (group.centred / (group.std + MIN_STD)).masked_fill(group.degenerate, 0.0)


@ESTIMATORS.declare("r - mean of the group", "arXiv:2503.20783")
def dr_grpo(step: GroupRewards, settings: AdvantageSettings) -> torch.Tensor:
    """A = r - mean of the group (Liu et al. 2025)."""
    group = _statistics(step.rewards)
    return group.centred.masked_fill(group.degenerate, 0.0)


@ESTIMATORS.declare("r - mean of the other samples of the group", "arXiv:2402.14740")
def rloo(step: GroupRewards, settings: AdvantageSettings) -> torch.Tensor:
    """A = r - mean of the other samples of the group (Ahmadian et al. 2024).

    That is n / (n - 1) times the distance from the mean of all n.
    """
    group = _statistics(step.rewards)
    scaled = group.centred * group.count / (group.count - 1).clamp(min=1)
    return scaled.masked_fill(group.degenerate, 0.0)


def _discounted_returns(step: TokenRewards, settings: AdvantageSettings) -> ValueTargets:
    """Return the discounted sum of the rewards from each token to the last."""
    from mindspeed_rl.algorithms.token_advantages import ValueTargets, discounted_sums

    returns = discounted_sums(step.rewards, step.lengths, settings.gamma)
    return ValueTargets(returns, returns)


@ESTIMATORS.declare(
    "discounted r (less the KL) from each token on, whitened over all tokens of the step",
    "arXiv:2501.03262",
    reads=("gamma",),
    of_tokens=_discounted_returns,
    min_group_size=1,
    whiten=True,
)
def reinforce_plus_plus(step: GroupRewards, settings: AdvantageSettings) -> torch.Tensor:
    """Return the reward itself, which is put at the last token (Hu 2025)."""
    return _known_rewards(step)


@ESTIMATORS.declare(
    "r - mean of the group, whitened over all tokens of the step", "arXiv:2501.03262", whiten=True
)
def reinforce_plus_plus_baseline(step: GroupRewards, settings: AdvantageSettings) -> torch.Tensor:
    """A = r - mean of the group, before it is whitened (Hu 2025)."""
    return dr_grpo(step, settings)


@ESTIMATORS.declare(
    "r - reward of the greedy response, which is sampled as well",
    "arXiv:2310.10505",
    min_group_size=1,
    needs_greedy=True,
)
def remax(step: GroupRewards, settings: AdvantageSettings) -> torch.Tensor:
    """A = r - reward of the greedy response (Li et al. 2023).

    A is 0 for the whole group where the greedy response has no reward.
    """
    assert step.greedy is not None
    difference = step.rewards - step.greedy[:, None]
    return difference.masked_fill(difference.isnan(), 0.0)


@ESTIMATORS.declare(
    "(r - mean of the group) x groups / groups whose rewards differ", "arXiv:2504.02546"
)
def gpg(step: GroupRewards, settings: AdvantageSettings) -> torch.Tensor:
    """A = a (r - mean), a = G / groups that teach something (Chu et al. 2025).

    The factor compensates for the groups of equal rewards, which add nothing to the gradient but
    count in its denominator.
    """
    group = _statistics(step.rewards)
    useful = (~group.degenerate).sum().clamp(min=1)
    return dr_grpo(step, settings) * group.degenerate.numel() / useful


@ESTIMATORS.declare("r - mean of the group weighted by response length", "arXiv:2505.23585")
def opo(step: GroupRewards, settings: AdvantageSettings) -> torch.Tensor:
    """A = r - sum(length r) / sum(length) of the group (Hao et al. 2025)."""
    group = _statistics(step.rewards)
    weight = step.lengths.to(step.rewards.dtype).masked_fill(~group.known, 0.0)
    # Sums distances from the mean, so that a large common reward does not cancel.
    shift = (weight * group.centred).sum(1, keepdim=True) / weight.sum(1, keepdim=True).clamp(min=1)
    return (group.centred - shift).masked_fill(group.degenerate | ~group.known, 0.0)


def _errors_of_the_critic(step: TokenRewards, settings: AdvantageSettings) -> ValueTargets:
    """Return the generalized advantages of the tokens, and the returns that the critic learns."""
    from mindspeed_rl.algorithms.token_advantages import generalized_advantages

    assert step.values is not None
    return generalized_advantages(
        step.rewards,
        step.values,
        step.lengths,
        discount=settings.gamma,
        trace_decay=settings.gae_lambda,
    )


@ESTIMATORS.declare(
    "errors of a critic from each token on, whitened over all tokens of the step (PPO)",
    "arXiv:1506.02438",
    reads=("gamma", "gae_lambda"),
    of_tokens=_errors_of_the_critic,
    min_group_size=1,
    whiten=True,
    needs_critic=True,
)
def gae(step: GroupRewards, settings: AdvantageSettings) -> torch.Tensor:
    """Return the reward itself, which is put at the last token (Schulman et al. 2015)."""
    return _known_rewards(step)


@ESTIMATORS.declare(
    "0, so that rewards are measured only and a teacher alone is followed "
    "(--teacher-hf-checkpoint)",
    name="none",
    min_group_size=1,
)
def no_advantage(step: GroupRewards, settings: AdvantageSettings) -> torch.Tensor:
    """Return 0 for every sample: what trains then is the teacher of each token."""
    return step.rewards.new_zeros(step.rewards.shape)


def _known_rewards(step: GroupRewards) -> torch.Tensor:
    return step.rewards.masked_fill(step.rewards.isnan(), 0.0)
