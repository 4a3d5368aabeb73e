"""Computes the findings of a dry run, everything that follows from the flags, once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mindspeed_rl.config import RLRunConfig, TrainingRunConfig
from mindspeed_rl.config.npu import check_npu
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.memory import MemoryPhase
from mindspeed_rl.handover.of_run import RunHandover, handover_of_run, update_traffic
from mindspeed_rl.packing.micro_batches import PackingEstimate, drawn_lengths
from mindspeed_rl.planning.budget import (
    device_bytes,
    machine_on,
    resolve_offload,
    usable_bytes,
    with_offload_order,
)
from mindspeed_rl.planning.cache_size import with_cache_size
from mindspeed_rl.planning.expert_dispatch import check_expert_map
from mindspeed_rl.planning.hccl_buffers import hccl_buffers
from mindspeed_rl.planning.prediction import MemoryPrediction, Peak, Table
from mindspeed_rl.planning.run_plan import (
    RLPlan,
    RunPlan,
    check_engine,
    longest_sequence,
    run_packing,
)
from mindspeed_rl.planning.step_time import StepSeconds, step_seconds
from mindspeed_rl.planning.suggestions import Suggestion, plan_of, suggest
from mindspeed_rl.weights.traffic import RankTraffic

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Findings:
    """The findings of a dry run.

    Attributes:
        prediction: Memory of every rank, with the configuration and the plan of the run.
        tables: Bytes by phase and owner of the first rank of every pipeline stage; the other ranks
            of a stage differ by the padding of buffers alone.
        peak: The fullest moment of any rank.
        budget_bytes: Bytes of a device that the run may use.
        offload_reason: Reason for the mode of offloading.
        cache_lines: What the size of the engine's cache is, where no flag says it.
        volume: Traffic of a weight update of some ranks; empty in supervised runs.
        handover: What follows the last optimizer step; ``None`` in supervised runs and with
            adapters.
        packing: Micro-batches of an optimizer step with drawn lengths.
        seconds: Estimated seconds of a step; ``None`` where no constants are known.
        suggestions: Single changes that lower the peak of a run that does not fit.
    """

    prediction: MemoryPrediction
    tables: Mapping[int, Mapping[MemoryPhase, Table]]
    peak: Peak
    budget_bytes: int
    offload_reason: str
    cache_lines: Sequence[str]
    volume: Sequence[RankTraffic]
    handover: RunHandover | None
    packing: PackingEstimate
    seconds: StepSeconds | None
    suggestions: Sequence[Suggestion]

    @property
    def ranks_per_stage(self) -> int:
        """Number of ranks of a pipeline stage."""
        return self.prediction.plan.parallel.ranks_per_stage

    @property
    def fits(self) -> bool:
        """Whether the fullest moment fits into the budget."""
        return self.peak.num_bytes <= self.budget_bytes


def world_size(config: TrainingRunConfig, environment: Mapping[str, str]) -> int:
    """Return the number of ranks of the run that is predicted; 1 where nothing gives it.

    Raises:
        UsageError: The environment gives what is no number of ranks.
    """
    if config.dry_run.rl_world_size:
        return config.dry_run.rl_world_size
    given = environment.get("WORLD_SIZE", "1")
    if not given.isdecimal() or int(given) < 1:
        raise UsageError(
            f"WORLD_SIZE={given}: must be the number of ranks, at least 1; fix the variable, or "
            "add --rl-world-size N (nodes x ranks per node)"
        )
    return int(given)


def is_world_assumed(config: TrainingRunConfig, environment: Mapping[str, str]) -> bool:
    """Whether neither the flag nor the environment gives the number of ranks."""
    return not config.dry_run.rl_world_size and "WORLD_SIZE" not in environment


def asks_for_ranks(config: TrainingRunConfig) -> bool:
    """Whether some parallel size is above 1, so that one rank is too few."""
    parallel, sizes = config.parallel, [1]
    if isinstance(config, RLRunConfig):
        rollout = config.rollout
        sizes = [rollout.rl_inference_tensor_model_parallel_size, rollout.rollout_dp]
    sizes += [parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size]
    sizes += [parallel.context_parallel_size, parallel.expert_model_parallel_size]
    return max(sizes) > 1


def find_out(config: TrainingRunConfig, world: int) -> Findings:
    """Predict a run of ``world`` ranks, from config.json and ``HCCL_BUFFSIZE``. Local.

    Args:
        config: Configuration of the run.
        world: Number of ranks.

    Raises:
        UsageError: The flags are not possible, or ``HCCL_BUFFSIZE`` is too small for them.
    """
    machine, plan = machine_on(config), plan_of(config, world)
    check_npu(config.ascend, config.parallel, machine.platform)  # refuse what a start would
    check_engine(config, plan, machine.platform)
    if machine.platform == "npu":
        check_expert_map(plan, machine.name)
        hccl_buffers(config, plan, machine.name, os.environ)
    budget = usable_bytes(device_bytes(config, machine.memory_gib * _GIB), machine)
    prediction = MemoryPrediction(config, plan, machine)
    cache_lines: list[str] = []
    if isinstance(config, RLRunConfig):
        config, cache_lines = with_cache_size(prediction, budget)
        prediction = replace(prediction, config=config)
    ranks = prediction.representatives()
    mode, why = resolve_offload(prediction, ranks, budget)
    prediction = with_offload_order(replace(prediction, offload=mode), ranks, budget)
    peak = prediction.peak(ranks)
    volume: Sequence[RankTraffic] = ()
    together = None
    if isinstance(plan, RLPlan) and isinstance(config, RLRunConfig):
        looked_at = list(dict.fromkeys((ranks[0], ranks[len(ranks) // 2], world - 1)))
        layouts = plan.megatron, plan.rollout_layout
        volume = update_traffic(config, *layouts, looked_at, machine.ranks_per_node)
        together = handover_of_run(
            config, *layouts, machine=machine.name, optimizer_bytes=prediction.stepped_bytes(ranks)
        )
    lengths = predicted_lengths(config, plan)
    packing = PackingEstimate.of(run_packing(config, plan), lengths)
    return Findings(
        prediction=prediction,
        tables={rank: prediction.rank_table(rank) for rank in ranks},
        peak=peak,
        budget_bytes=budget,
        offload_reason=why,
        cache_lines=cache_lines,
        volume=volume,
        handover=together,
        packing=packing,
        seconds=step_seconds(prediction, packing, lengths),
        suggestions=() if peak.num_bytes <= budget else suggest(prediction, ranks, budget),
    )


def predicted_lengths(config: TrainingRunConfig, plan: RunPlan) -> list[int]:
    """Draw the lengths of the sequences of one optimizer step. Pure.

    Raises:
        UsageError: A mean of the dry run's flags is longer than a sequence may be, or two are
            given.
    """
    longest = longest_sequence(config, plan) or plan.spec.max_position_embeddings
    name, mean = "--rl-dry-run-mean-length", config.dry_run.rl_dry_run_mean_length
    response = config.dry_run.rl_dry_run_mean_response_length
    if response and isinstance(config, RLRunConfig):
        if mean:
            raise UsageError(f"{name} and --rl-dry-run-mean-response-length: give one of them")
        limit = config.rollout.rollout_max_response_length
        if response > limit:
            raise UsageError(
                f"--rl-dry-run-mean-response-length {response:g}: responses have at most {limit} "
                "tokens (--rollout-max-response-length); lower it"
            )
        mean = response + config.prompts.max_prompt_length / 3
    if mean > longest:
        raise UsageError(f"{name} {mean:g}: sequences have at most {longest} tokens; lower it")
    samples = config.train.global_batch_size
    if isinstance(plan, RLPlan):
        samples = plan.batch.samples_per_update
    if isinstance(config, RLRunConfig) and config.benchmark.active:
        return [longest] * samples
    return drawn_lengths(samples, mean or longest / 3, longest)
