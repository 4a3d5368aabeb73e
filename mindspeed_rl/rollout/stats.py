"""What the engine ran in a step: metrics, and the history that graph sizes are chosen from."""

from __future__ import annotations

from pathlib import Path

from mindspeed_rl.metrics.metric_set import Mean, MetricSet
from mindspeed_rl.rollout.engine import InferenceEngine
from mindspeed_rl.rollout.graph_sizes import read_history, write_history
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
