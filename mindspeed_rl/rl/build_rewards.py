"""From the reward flags to the pool that scores the samples of an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.data.prompts import PromptDataset
from mindspeed_rl.rewards import (
    CodeSettings,
    PoolBase,
    RemoteSettings,
    RewardPool,
    RewardSettings,
    RewardSpec,
    row_weights,
)

_GIB = 2**30


def reward_settings(config: RLRunConfig) -> RewardSettings:
    """The reward flags, as the built-in rewards read them."""
    flags = config.rewards
    return RewardSettings(
        row_key=flags.reward_key,
        max_response_tokens=config.rollout.rollout_max_response_length,
        length_target=flags.reward_length_target,
        format_regex=flags.reward_format_regex,
        code=CodeSettings(
            time_limit_s=flags.reward_code_time_limit_s,
            memory_bytes=int(flags.reward_code_memory_gb * _GIB),
            max_processes=flags.reward_code_processes,
            score=flags.reward_code_score,
            network=flags.reward_code_network,
        ),
        remote=RemoteSettings(
            url=flags.reward_url,
            timeout_s=flags.reward_url_timeout_s,
            retries=flags.reward_url_retries,
            concurrency=flags.reward_url_concurrency,
        ),
    )


def make_reward_pool(config: RLRunConfig, specs: Sequence[RewardSpec]) -> PoolBase:
    """The reward processes or actors of this rank's engine.

    Raises:
        ValueError: ``--reward-pool ray`` without ray.
    """
    flags = config.rewards
    kind: Callable[..., PoolBase] = RewardPool
    if config.rewards_in_ray:
        from mindspeed_rl.rewards.ray_pool import RayRewardPool

        kind = RayRewardPool
    return kind(
        specs,
        num_workers=flags.reward_num_workers,
        timeout_s=flags.reward_timeout_s,
        batch_timeout_s=config.logging.phase_timeout_s,
        timeout_score=flags.reward_timeout_score,
        memory_limit_bytes=int(flags.reward_memory_limit_gb * _GIB),
        max_error_rate=flags.reward_max_error_rate,
        settings=reward_settings(config),
    )


def check_row_rewards(
    config: RLRunConfig, specs: Sequence[RewardSpec], datasets: Sequence[PromptDataset]
) -> None:
    """Every row that names its rewards must name rewards of the run. Local.

    Raises:
        ValueError: naming the file, the prompt and the field.
    """
    weights = {spec.label: spec.weight for spec in specs}
    for dataset in datasets:
        for question in dataset.questions:
            try:
                row_weights(weights, question.metadata, config.rewards.reward_key)
            except ValueError as error:
                raise ValueError(
                    f"{dataset.source}, prompt {question.text!r:.100}: {error}"
                ) from None
