"""The reward for short responses."""

from __future__ import annotations

from functools import partial

from mindspeed_rl.rewards.registry import register_factory
from mindspeed_rl.rewards.settings import RewardSettings
from mindspeed_rl.rewards.types import RewardFunction, RewardRequest


def length_reward(request: RewardRequest, target: int, limit: int) -> float:
    """1.0 up to ``target`` tokens, falling linearly to 0.0 at ``limit`` tokens.

    A response that was cut off gets 0.0 whatever its length.
    """
    if request.finish_reason != "stop":
        return 0.0
    beyond = max(0, request.num_response_tokens - target)
    return max(0.0, 1.0 - beyond / (limit - target))


@register_factory("length")
def make_length_reward(settings: RewardSettings) -> RewardFunction:
    """The function for the limits of a run.

    Raises:
        ValueError: the target is not below the limit of a response.
    """
    target, limit = settings.length_target, settings.max_response_tokens
    if not 0 <= target < limit:
        raise ValueError(
            f"--reward-length-target {target}: the reward 'length' falls from there to "
            f"--rollout-max-response-length {limit}; give a smaller number"
        )
    return partial(length_reward, target=target, limit=limit)
