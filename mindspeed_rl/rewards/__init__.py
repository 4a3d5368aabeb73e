"""Rewards: from decoded responses to one number per sample, in processes that can be killed."""

# Importing a module of rewards registers them; math-verify itself is imported when first used.
from mindspeed_rl.config.reward_spec import RewardSpec
from mindspeed_rl.rewards.environment import environment_reward
from mindspeed_rl.rewards.format_check import extract_last_number, format_reward, lenient_match
from mindspeed_rl.rewards.heavy import make_code_reward, make_remote_reward
from mindspeed_rl.rewards.length import length_reward
from mindspeed_rl.rewards.math_answer import exact_match_reward, math_reward
from mindspeed_rl.rewards.numeric import numeric_match_reward
from mindspeed_rl.rewards.pool import RewardPool
from mindspeed_rl.rewards.pool_base import PoolBase, Scoring
from mindspeed_rl.rewards.registry import (
    known_rewards,
    register_reward,
    resolve_reward,
)
from mindspeed_rl.rewards.scoring import WeightedReward, row_weights, score_sample
from mindspeed_rl.rewards.settings import CodeSettings, RemoteSettings, RewardSettings
from mindspeed_rl.rewards.types import (
    RewardError,
    RewardFunction,
    RewardRequest,
    RewardResult,
    status_rate,
)

__all__ = [
    "CodeSettings",
    "PoolBase",
    "RemoteSettings",
    "RewardError",
    "RewardFunction",
    "RewardPool",
    "RewardRequest",
    "RewardResult",
    "RewardSettings",
    "RewardSpec",
    "Scoring",
    "WeightedReward",
    "environment_reward",
    "exact_match_reward",
    "extract_last_number",
    "format_reward",
    "known_rewards",
    "length_reward",
    "lenient_match",
    "make_code_reward",
    "make_remote_reward",
    "math_reward",
    "numeric_match_reward",
    "register_reward",
    "resolve_reward",
    "row_weights",
    "score_sample",
    "status_rate",
]
