"""1 for short responses, falling to 0 at the limit of a response."""

from __future__ import annotations

from functools import partial

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.rewards.types import BuiltInReward, RewardFunction, RewardRequest, RewardSettings


def _make(settings: RewardSettings) -> RewardFunction:
    """Make the reward with the target of ``--reward-length-target``.

    Raises:
        UsageError: the target is not below the limit of a response.
    """
    target, limit = settings.flags.reward_length_target, settings.max_response_tokens
    if not 0 <= target < limit:
        raise UsageError(
            f"--reward-length-target {target}: the reward 'length' falls from there to "
            f"--rollout-max-response-length {limit}; give a smaller number"
        )
    return partial(length_reward, target=target, limit=limit)


def length_reward(request: RewardRequest, target: int, limit: int) -> float:
    """Return 1.0 up to ``target`` tokens, falling linearly to 0.0 at ``limit`` tokens.

    A response that was cut off gets 0.0 whatever its length.
    """
    if request.finish_reason != "stop":
        return 0.0
    beyond = max(0, request.num_response_tokens - target)
    return max(0.0, 1.0 - beyond / (limit - target))


REWARD = BuiltInReward(_make)
