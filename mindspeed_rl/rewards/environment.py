"""The reward that an environment gave."""

from __future__ import annotations

from mindspeed_rl.rewards.registry import register_reward
from mindspeed_rl.rewards.types import RewardRequest

ENVIRONMENT_REWARD = "environment_reward"
TRANSCRIPT = "transcript"


@register_reward("environment")
def environment_reward(request: RewardRequest) -> float | None:
    """What the environment of ``--rl-environment`` said at the end; ``None`` when it said nothing.

    Raises:
        ValueError: the run has no environment.
    """
    if ENVIRONMENT_REWARD not in request.metadata:
        raise ValueError("reward 'environment': the run has no --rl-environment; add one")
    reward: float | None = request.metadata[ENVIRONMENT_REWARD]  # checked like that of any function
    return reward
