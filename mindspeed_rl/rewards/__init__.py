"""Rewards: from decoded responses to one number per sample, in processes that can be killed."""

# Importing a module of rewards registers them; math-verify itself is imported when first used.
from mindspeed_rl.rewards.format_check import extract_last_number, format_reward, lenient_match
from mindspeed_rl.rewards.math_answer import exact_match_reward, math_reward
from mindspeed_rl.rewards.pool import RewardPool
from mindspeed_rl.rewards.registry import (
    RewardSpec,
    known_rewards,
    register_reward,
    resolve_reward,
)
from mindspeed_rl.rewards.scoring import WeightedReward, score_sample
from mindspeed_rl.rewards.types import (
    RewardError,
    RewardFunction,
    RewardRequest,
    RewardResult,
    status_rate,
)

__all__ = [
    "RewardError",
    "RewardFunction",
    "RewardPool",
    "RewardRequest",
    "RewardResult",
    "RewardSpec",
    "WeightedReward",
    "exact_match_reward",
    "extract_last_number",
    "format_reward",
    "known_rewards",
    "lenient_match",
    "math_reward",
    "register_reward",
    "resolve_reward",
    "score_sample",
    "status_rate",
]
