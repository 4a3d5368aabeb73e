"""Builds the pool that scores the samples of an engine, and checks the rewards of rows."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.data.prompts import PromptDataset
from mindspeed_rl.rewards import RewardPool, RewardSettings, RewardSpec, row_weights


def make_reward_pool(config: RLRunConfig) -> RewardPool:
    """Start the reward processes or actors of this rank's engine.

    Raises:
        UsageError: ``--reward-pool ray`` without ray.
    """
    pool = RewardPool
    if config.rewards_in_ray:
        from mindspeed_rl.rewards.ray_pool import RayRewardPool

        pool = RayRewardPool
    limit = config.rollout.rollout_max_response_length
    return pool(RewardSettings(config.rewards, limit), config.logging.phase_timeout_s)


def check_row_rewards(
    config: RLRunConfig, specs: Sequence[RewardSpec], datasets: Sequence[PromptDataset]
) -> None:
    """Check that every row that names its rewards names rewards of the run. Local.

    Raises:
        UsageError: the message names the file, the prompt and the field.
    """
    weights = {spec.label: spec.weight for spec in specs}
    for dataset in datasets:
        for question in dataset.questions:
            try:
                row_weights(weights, question.metadata, config.rewards.reward_key)
            except ValueError as error:
                raise UsageError(
                    f"{dataset.source}, prompt {question.text!r:.100}: {error}"
                ) from None
