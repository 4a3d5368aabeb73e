"""Rewards: turn decoded responses into one number per sample, in processes that can be killed."""

from mindspeed_rl.config.reward_spec import RewardSpec
from mindspeed_rl.rewards.answers import extract_last_number, lenient_match
from mindspeed_rl.rewards.pool import RewardPool, Scoring
from mindspeed_rl.rewards.registry import resolve_reward
from mindspeed_rl.rewards.scoring import WeightedReward, row_weights, score_sample
from mindspeed_rl.rewards.types import (
    RewardError,
    RewardFunction,
    RewardRequest,
    RewardResult,
    RewardSettings,
)

__all__ = [
    "RewardError",
    "RewardFunction",
    "RewardPool",
    "RewardRequest",
    "RewardResult",
    "RewardSettings",
    "RewardSpec",
    "Scoring",
    "WeightedReward",
    "extract_last_number",
    "lenient_match",
    "resolve_reward",
    "row_weights",
    "score_sample",
]
