"""Advantages of whole samples, relative to their group or to a baseline of their prompt.

Shapes: G groups (prompts) of n samples each.

Every estimator gives an abstained reward (NaN) the advantage 0 and keeps it out of all baselines.
A group whose rewards are all equal teaches nothing: where the baseline is the group's own, its
advantages are exactly 0, also when rounding makes the rewards differ from their mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

# Below this a standard deviation is rounding: what is divided by it becomes 0.
MIN_STD = 1e-4


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """What an estimator knows of a step; the same on all ranks.

    Attributes:
        rewards: [G, n], NaN where a reward abstained.
        lengths: [G, n] tokens of each response.
        greedy: [G] rewards of the greedy responses, NaN where one abstained; ``None`` unless the
            estimator asks for them.
    """

    rewards: torch.Tensor
    lengths: torch.Tensor
    greedy: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _RewardGroup:
    """Statistics of each group over the rewards that are known, all [G, n] or [G, 1]."""

    known: torch.Tensor
    count: torch.Tensor
    centred: torch.Tensor
    std: torch.Tensor
    degenerate: torch.Tensor


def _statistics(rewards: torch.Tensor) -> _RewardGroup:
    """Mean and unbiased deviation in two passes, in fp64: equal rewards have none."""
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
    """Which groups have rewards that differ: [G, n] -> [G] bool."""
    return ~_statistics(rewards).degenerate[:, 0]


def grpo(step: GroupRewards) -> torch.Tensor:
    """A = (r - mean) / (std + 1e-4) of the group (Shao et al. 2024, arXiv:2402.03300)."""
    group = _statistics(step.rewards)
    return (group.centred / (group.std + MIN_STD)).masked_fill(group.degenerate, 0.0)


def dr_grpo(step: GroupRewards) -> torch.Tensor:
    """A = r - mean of the group (Liu et al. 2025, arXiv:2503.20783)."""
    group = _statistics(step.rewards)
    return group.centred.masked_fill(group.degenerate, 0.0)


def rloo(step: GroupRewards) -> torch.Tensor:
    """A = r - mean of the other samples of the group (Ahmadian et al. 2024, arXiv:2402.14740).

    That is n / (n - 1) times the distance from the mean of all n.
    """
    group = _statistics(step.rewards)
    scaled = group.centred * group.count / (group.count - 1).clamp(min=1)
    return scaled.masked_fill(group.degenerate, 0.0)


def gpg(step: GroupRewards) -> torch.Tensor:
    """A = a (r - mean), a = G / groups that teach something (Chu et al. 2025, arXiv:2504.02546).

    The factor makes up for the groups of equal rewards, which add nothing to the gradient but
    count in its denominator.
    """
    group = _statistics(step.rewards)
    useful = (~group.degenerate).sum().clamp(min=1)
    return dr_grpo(step) * group.degenerate.numel() / useful


def opo(step: GroupRewards) -> torch.Tensor:
    """A = r - sum(length r) / sum(length) of the group (Hao et al. 2025, arXiv:2505.23585)."""
    group = _statistics(step.rewards)
    weight = step.lengths.to(step.rewards.dtype).masked_fill(~group.known, 0.0)
    # of distances from the mean, so that a large common reward does not cancel
    shift = (weight * group.centred).sum(1, keepdim=True) / weight.sum(1, keepdim=True).clamp(min=1)
    return (group.centred - shift).masked_fill(group.degenerate | ~group.known, 0.0)


def remax(step: GroupRewards) -> torch.Tensor:
    """A = r - reward of the greedy response (Li et al. 2023, arXiv:2310.10505).

    0 for the whole group where the greedy response has no reward.
    """
    if step.greedy is None:
        raise RuntimeError("remax needs the rewards of greedy responses")
    difference = step.rewards - step.greedy[:, None]
    return difference.masked_fill(difference.isnan(), 0.0)


def plain_reward(step: GroupRewards) -> torch.Tensor:
    """A = r, for estimators of tokens: REINFORCE++ (Hu 2025, arXiv:2501.03262) and GAE."""
    return step.rewards.masked_fill(step.rewards.isnan(), 0.0)


@dataclass(frozen=True, slots=True)
class Estimator:
    """An advantage estimator.

    Attributes:
        of_samples: the advantage, or reward, of each sample, [G, n] of the rewards' type.
        min_group_size: smallest n that has a signal.
        whiten: whiten over the trained tokens of the step afterwards.
        returns: the sample's value is a reward at its last token, discounted back over it.
        needs_greedy: whether :attr:`GroupRewards.greedy` must be there.
        needs_critic: the sample's value is a reward at its last token, for
            :func:`~mindspeed_rl.algorithms.token_advantages.generalized_advantages`.
    """

    of_samples: Callable[[GroupRewards], torch.Tensor]
    min_group_size: int = 2
    whiten: bool = False
    returns: bool = False
    needs_greedy: bool = False
    needs_critic: bool = False

    @property
    def of_tokens(self) -> bool:
        """Whether the sample's value is a reward at its last token."""
        return self.returns or self.needs_critic


ESTIMATORS = {
    "grpo": Estimator(grpo),
    "dr_grpo": Estimator(dr_grpo),
    "rloo": Estimator(rloo),
    "reinforce_plus_plus": Estimator(plain_reward, min_group_size=1, whiten=True, returns=True),
    "reinforce_plus_plus_baseline": Estimator(dr_grpo, whiten=True),
    "remax": Estimator(remax, min_group_size=1, needs_greedy=True),
    "gpg": Estimator(gpg),
    "opo": Estimator(opo),
    "gae": Estimator(plain_reward, min_group_size=1, whiten=True, needs_critic=True),
}
"""By the name of ``--rl-advantage-estimator``."""
