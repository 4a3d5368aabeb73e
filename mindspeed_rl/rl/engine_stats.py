"""What the engine ran in a step: metrics, and the history that graph sizes are chosen from."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.config.check_engine import AUTO
from mindspeed_rl.config.validate import RLPlan
from mindspeed_rl.launch.job import Job
from mindspeed_rl.observability.metrics import Mean, MetricSet
from mindspeed_rl.rollout.engine import InferenceEngine
from mindspeed_rl.rollout.graph_sizes import best_graph_sizes, read_history, write_history
from mindspeed_rl.rollout.step_loop import StepStats


def take_stats(engine: InferenceEngine) -> StepStats:
    """What the engine ran since the last call; counting begins again. Local."""
    stats, engine.stats = engine.stats, StepStats()
    return stats


def step_metrics(stats: StepStats, data_parallel: bool) -> MetricSet:
    """Time and idling of the engine's steps, weighted by steps. Local.

    With data-parallel ranks in an engine, also what their agreement takes: reductions per step,
    milliseconds of waiting for each other, and how often all wait for a prompt of one; NaN where
    the reduction is the engine's own.
    """
    metrics = MetricSet(
        {
            "rollout/steps": Mean.of([stats.steps]),
            "throughput/engine_ms_per_step": Mean(1e3 * stats.seconds, stats.steps),
        }
    )
    if data_parallel:
        ours = float(stats.steps) if stats.reductions else 0.0
        metrics["rollout/idle_step_rate"] = Mean(stats.dummy_steps, stats.steps)
        metrics["rollout/dp_reductions_per_step"] = Mean(stats.reductions, ours)
        metrics["rollout/prompt_step_rate"] = Mean(stats.prompt_steps, ours)
        metrics["throughput/dp_sync_ms_per_step"] = Mean(1e3 * stats.sync_seconds, ours)
    return metrics


def record_history(folder: Path, stats: StepStats, data_parallel: int) -> None:
    """Add the decode steps of this rank's engine to the file of the run.

    Data-parallel ranks of an engine run the batch of their fullest rank, which only our reduction
    tells: without it nothing is recorded.

    Args:
        folder: ``--output-dir``.
        stats: of one pass.
        data_parallel: ranks with requests of their own in an engine.
    """
    if data_parallel > 1 and not stats.reductions:
        return
    write_history(folder, read_history(folder) + stats.running)


def graph_sizes(job: Job[RLRunConfig, RLPlan]) -> tuple[int, ...]:
    """What ``--rollout-graph-sizes`` comes to; empty leaves the engine's own. Collective: world.

    ``auto`` is decided by rank 0, whose disk has the history, and printed with its waste.
    """
    tuning, output = job.config.engine, Path(job.config.logging.output_dir)
    if tuning.rollout_graph_sizes != AUTO:
        return tuple(sorted({int(size) for size in tuning.rollout_graph_sizes}))
    chosen: list[tuple[int, ...]] = [()]
    if job.world.rank == 0:
        if history := read_history(output):
            found = best_graph_sizes(history, tuning.rollout_graph_count)
            chosen = [found.sizes]
            job.say(
                f"graph sizes {' '.join(map(str, found.sizes))}: over the {history.total()} decode "
                f"steps of {output}, {found.waste:.1%} of the rows would be padding"
            )
        else:
            job.say(f"graph sizes: no earlier decode steps in {output}, the engine keeps its own")
    dist.broadcast_object_list(chosen, 0)
    return chosen[0]
