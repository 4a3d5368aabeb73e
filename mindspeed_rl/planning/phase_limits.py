"""How long the phases of a step may take before a run counts as hung."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from mindspeed_rl.config import PretrainRunConfig, RLRunConfig, ScoreRunConfig
from mindspeed_rl.engines.registry import engine_provider
from mindspeed_rl.models.flops import sequence_flops
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.models.tensors import num_parameters
from mindspeed_rl.planning.run_plan import RLPlan, RunPlan

GENERATE_FLOPS = 5e12
"""Operations per second of a device at which rollouts count as alive.

The slowest published rollouts make as many: Qwen3-235B-A22B on 128 dies, whose 8192 samples of 7445
tokens take 4066 s (docs/memory.md).
"""
TRAIN_FLOPS = 2.5e13
"""The same of passes over whole sequences; the update of that run makes 2.7e13 in 2353 s."""
CPU_FLOPS = 1e9
"""The same of a rank on CPU, for both."""
DECODE_STEP_S = 0.2
"""One token of the longest response; 0.171 s in eager mode at 480B (vllm-ascend issue 7723)."""
UPDATE_PASSES = 4
"""An update in forward passes: one, two backward, and one for layers that are recomputed."""
STORAGE_BYTES_PER_S = 5e8
"""Bytes per second of a slow shared file system, of the whole job."""
STATE_BYTES = 14
"""Bytes of a checkpoint per parameter: weights in bf16, master weights and two moments in fp32."""
GROWTH = 10
"""A phase over samples may take so many times the longest one of the steps before."""
LEARNING_STEPS = 2
"""Number of steps after which a run knows how long its phases take."""


@dataclass(frozen=True, slots=True)
class PhaseLimits:
    """The longest time of each phase, in seconds.

    Attributes:
        other: Limit of the phases that are not in ``of_phase``.
        of_phase: Limits by the names of phases.
        over_samples: Names of the phases whose limits are for samples of the greatest length.
    """

    other: float
    of_phase: Mapping[str, float] = field(default_factory=dict)
    over_samples: frozenset[str] = frozenset()

    def of(self, phase: str, longest_s: float | None = None) -> float:
        """Return the limit of a phase.

        Args:
            phase: Name of the phase.
            longest_s: Seconds of the longest phase over samples so far, which bounds the next ones;
                ``None``: not known yet.
        """
        limit = self.of_phase.get(phase, self.other)
        if longest_s is None or phase not in self.over_samples:
            return limit
        return min(limit, max(self.other, GROWTH * longest_s))

    @property
    def longest(self) -> float:
        """The limit of the phase that may take longest."""
        return max([self.other, *self.of_phase.values()])

    def line(self) -> str:
        """Return the limits as a line for the log."""
        parts = [f"{name} {limit:.0f}" for name, limit in self.of_phase.items()]
        rest = f"{'others' if parts else 'each'} {self.other:.0f}"
        return f"limits of phases, in seconds (--phase-timeout-s): {', '.join([*parts, rest])}"


def phase_limits(
    config: RLRunConfig | PretrainRunConfig | ScoreRunConfig, plan: RunPlan, platform: str
) -> PhaseLimits:
    """Return the limits of the phases of a run. Pure.

    ``--phase-timeout-s`` is the limit of every phase. Without it each has the default. Phases over
    the samples of a step have, on top, what these take at the speeds above when all are as long as
    the flags allow; phases over files, what a checkpoint takes on a slow file system.

    Args:
        config: Configuration of the run.
        plan: Its plan.
        platform: Kind of device.
    """
    other = config.logging.phase_limit_s
    if config.logging.phase_timeout_s is not None or isinstance(config, ScoreRunConfig):
        return PhaseLimits(other)
    files = other + STATE_BYTES * num_parameters(plan.spec) / STORAGE_BYTES_PER_S
    of_files = dict.fromkeys(("load", "save", "export"), files)
    if isinstance(config, PretrainRunConfig):
        length = config.train.seq_length or plan.spec.max_position_embeddings
        work = UPDATE_PASSES * config.train.global_batch_size * _forward(plan.spec, length)
        over_samples = {"train": other + _train_s(plan, platform, work)}
        return PhaseLimits(other, over_samples | of_files, frozenset(over_samples))
    assert isinstance(plan, RLPlan)
    samples = plan.batch.samples
    # A rank whose engine is ready early waits for the slowest one.
    asked = math.ceil(samples * config.sampling.rl_resample_factor)
    generate = other + _generate_s(config, plan, platform, asked)
    work = samples * _forward(plan.spec, plan.max_model_len) * passes(config, plan)
    train = other + _train_s(plan, platform, work)
    waiting = ("tail", "wait") if config.rl.tail_passes else ("wait",)
    over_samples = dict.fromkeys(("generate", *waiting), generate)
    over_samples |= dict.fromkeys(("train", "update"), train)
    return PhaseLimits(other, over_samples | of_files, frozenset(over_samples))


def evaluation_limit(config: RLRunConfig, plan: RLPlan, platform: str, num_prompts: int) -> float:
    """Return the limit of an evaluation on so many prompts, in seconds. Pure.

    The greedy responses come before the sampled ones.
    """
    limit = config.logging.phase_limit_s
    if config.logging.phase_timeout_s is not None:
        return limit
    sampled = num_prompts * config.prompts.rl_eval_samples
    passes = [num_prompts, sampled] if sampled else [num_prompts]
    return limit + sum(_generate_s(config, plan, platform, count) for count in passes)


def _generate_s(config: RLRunConfig, plan: RLPlan, platform: str, samples: int) -> float:
    """Return the seconds in which engines that are alive give so many responses.

    An engine has so many of them at once. An environment may take as long for each of its answers
    as the longest response does, and agents their time limit.
    """
    speed = plan.parallel.world * (CPU_FLOPS if platform == "cpu" else GENERATE_FLOPS)
    per_token, _ = sequence_flops(plan.spec)
    at_once = engine_provider().sizes(config.engine_options, plan.spec, platform).sequences
    batches = math.ceil(samples / (plan.engine.num_replicas * at_once))
    agents_s = 0.0
    if config.agent.rl_agent:
        waves = math.ceil(samples / (plan.engine.num_groups * config.agent.at_once))
        agents_s = waves * config.agent.rl_agent_time_limit_s
    longest = config.max_turns * batches * config.rollout.rollout_max_response_length
    computed = samples * plan.max_model_len * per_token / speed
    return max(computed, longest * DECODE_STEP_S, agents_s)


def _train_s(plan: RunPlan, platform: str, work: float) -> float:
    speed = plan.parallel.world * (CPU_FLOPS if platform == "cpu" else TRAIN_FLOPS)
    return work / speed


def _forward(spec: ModelSpec, length: int) -> float:
    """Return the operations of the forward pass over a sequence."""
    per_token, per_pair = sequence_flops(spec)
    return per_token * length + per_pair * length**2


def passes(config: RLRunConfig, plan: RLPlan) -> int:
    """Return the passes over each sample of a step, in forward passes, at most."""
    has_reference = bool(config.rl.grpo_kl_beta)
    scored = 1 + has_reference + config.has_critic + len(plan.readers)
    return scored + UPDATE_PASSES * plan.batch.iterations * (1 + config.has_critic)
