"""Throughput of an RL step, from its samples and the seconds of its phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.launch.job import Job
from mindspeed_rl.metrics.names import STEP_TIME
from mindspeed_rl.metrics.throughput import TokenCount, devices_of, token_rates, utilisation
from mindspeed_rl.models.flops import training_flops
from mindspeed_rl.planning.run_plan import RLPlan
from mindspeed_rl.rl.rollouts import RolloutBatch
from mindspeed_rl.samples.rollout_info import RolloutInfo
from mindspeed_rl.samples.store import SampleStore

# Phases from the first request of a rollout to the end of its slowest engine.
_ROLLOUT = ("generate", "tail", "reward", "wait")


def step_throughput(
    job: Job[RLRunConfig, RLPlan],
    store: SampleStore,
    rollouts: RolloutBatch,
    step: int,
    values: Mapping[str, float],
) -> dict[str, float]:
    """Return the throughput of step, rollout and update. Local, equal on all ranks.

    Args:
        job: Job of the run.
        store: Knows the lengths of prompts.
        rollouts: Samples of the step; those it generated count for step and rollout, those it
            trained on for the update.
        step: Number of the step.
        values: Reduced metrics of the step: times of phases, skipped optimizer steps.
    """
    world, name = job.plan.parallel.world, job.platform.device_name
    devices = devices_of(job.config, world, name)
    generated = token_count(store, rollouts.generated)
    trained = token_count(store, rollouts.samples)
    rollout_s = sum(values.get(f"time/{phase}_s", 0.0) for phase in _ROLLOUT)
    update_s = values.get("time/update_s", 0.0)
    policy, critic = passes(job, step, values.get("optimizer/skipped", 0.0))
    trained = TokenCount(round(policy * trained.prompt), round(policy * trained.response))
    lengths = [store.num_prompt_tokens(s) + s.num_tokens for s in rollouts.samples]
    flops = policy * training_flops(job.plan.spec, lengths)
    if job.plan.critic is not None:
        flops += critic * training_flops(job.plan.critic.spec, lengths)
    return {
        **token_rates("", generated, values[STEP_TIME], devices),
        **token_rates("rollout_", generated, rollout_s, devices),
        **token_rates("update_", trained, update_s, devices),
        **utilisation("update_", flops, update_s, devices),
    }


def passes(job: Job[RLRunConfig, RLPlan], step: int, skipped: float) -> tuple[float, float]:
    """Return how often the updates of a step go over its samples: the policy's and the critic's.

    Args:
        job: Job of the run.
        step: Number of the step; in the critic's warm-up the policy is not updated.
        skipped: Optimizer steps of the policy that had nothing to train on, by number.
    """
    batch = job.plan.batch
    policy = batch.iterations * (1 - skipped / batch.updates)
    warmup = step <= job.config.critic.critic_warmup_steps
    return (0.0 if warmup else policy), float(batch.iterations)


def token_count(store: SampleStore, samples: Sequence[RolloutInfo]) -> TokenCount:
    """Count the tokens of samples; the prompt counts for each of its responses."""
    prompts = sum(store.num_prompt_tokens(sample) for sample in samples)
    return TokenCount(prompts, sum(sample.num_tokens for sample in samples))
