"""Rewards whose modules are imported by the workers that use them only."""

from __future__ import annotations

from mindspeed_rl.rewards.registry import register_factory
from mindspeed_rl.rewards.settings import RewardSettings
from mindspeed_rl.rewards.types import RewardFunction


@register_factory("code")
def make_code_reward(settings: RewardSettings) -> RewardFunction:
    """Unit tests in a sandbox; tries what the machine allows."""
    from mindspeed_rl.rewards.code import CodeReward

    return CodeReward(settings.code)


@register_factory("remote")
def make_remote_reward(settings: RewardSettings) -> RewardFunction:
    """The reward of the run's server."""
    from mindspeed_rl.rewards.remote import RemoteReward

    return RemoteReward(settings.remote)
