"""1 when the response is the answer, white space at the ends aside."""

from __future__ import annotations

from mindspeed_rl.rewards.types import BuiltInReward, RewardRequest


def exact_match_reward(request: RewardRequest) -> float:
    """Return 1.0 when the response equals the answer, white space at the ends aside, else 0.0."""
    return float(request.response.strip() == request.answer.strip())


REWARD = BuiltInReward(lambda settings: exact_match_reward, verdict=5)
