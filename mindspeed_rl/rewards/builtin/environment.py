"""What --rl-environment or --rl-agent says at the end of the conversation."""

from __future__ import annotations

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.rewards.types import BuiltInReward, RewardRequest

ENVIRONMENT_REWARD = "environment_reward"
TRANSCRIPT = "transcript"


def environment_reward(request: RewardRequest) -> float | None:
    """Return the last reward of the environment or agent; ``None`` when it gave none.

    Raises:
        UsageError: the run has neither.
    """
    if ENVIRONMENT_REWARD not in request.metadata:
        raise UsageError("reward 'environment': the run has no --rl-environment and no --rl-agent")
    reward: float | None = request.metadata[ENVIRONMENT_REWARD]  # score_sample checks its type
    return reward


REWARD = BuiltInReward(lambda settings: environment_reward, verdict=3)
