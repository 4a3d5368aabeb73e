"""What --rl-environment says at the end of the conversation."""

from __future__ import annotations

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.rewards.types import BuiltInReward, RewardRequest

ENVIRONMENT_REWARD = "environment_reward"
TRANSCRIPT = "transcript"


def environment_reward(request: RewardRequest) -> float | None:
    """Return the last reward of the ``--rl-environment``; ``None`` when it gave none.

    Raises:
        UsageError: the run has no environment.
    """
    if ENVIRONMENT_REWARD not in request.metadata:
        raise UsageError("reward 'environment': the run has no --rl-environment; add one")
    reward: float | None = request.metadata[ENVIRONMENT_REWARD]  # score_sample checks its type
    return reward


REWARD = BuiltInReward(lambda settings: environment_reward, verdict=3)
