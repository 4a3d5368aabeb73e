"""Turns the configuration of a run into that of its throughput run."""

from __future__ import annotations

import math
from dataclasses import replace

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.errors import UsageError


def as_benchmark(config: RLRunConfig) -> RLRunConfig:
    """Return the configuration of the throughput run of a run; the same where none is asked for.

    Raises:
        UsageError: ``--rl-benchmark-lengths`` has not two numbers.
    """
    lengths = config.benchmark.rl_benchmark_lengths
    if not lengths:
        return config
    if len(lengths) != 2:
        raise UsageError(
            f"--rl-benchmark-lengths {' '.join(map(str, lengths))}: give two numbers, the tokens "
            "of a prompt and of a response"
        )
    prompt, response = lengths
    rewards, critic = config.rewards, config.critic
    return replace(
        config,
        prompts=type(config.prompts)(max_prompt_length=prompt),
        # The engine chooses other experts than the trainer, so log-probs may differ by any amount.
        rollout=replace(
            config.rollout, rollout_max_response_length=response, rl_sync_check_tol=math.inf
        ),
        train=replace(config.train, seq_length=0),
        rewards=type(rewards)(
            reward_model_hf_checkpoint=rewards.reward_model_hf_checkpoint,
            reward_model_weight=rewards.reward_model_weight,
        ),
        sampling=type(config.sampling)(),
        balance=replace(
            config.balance,
            prompt_order="shuffled",
            response_length_cap_factor=0.0,
            response_length_cap_floor=type(config.balance)().response_length_cap_floor,
        ),
        environment=type(config.environment)(),
        checkpoint=type(config.checkpoint)(),
        critic=replace(critic, critic_export_hf=""),
        logging=replace(config.logging, log_rollouts=0, log_rollout_tokens=False),
        rl=replace(config.rl, rl_control="none", rl_max_logprob_diff=0.0, rl_routing_replay="none"),
    )
