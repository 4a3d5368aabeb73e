"""Metrics of the engine's steps, and the history from which graph sizes are chosen."""

from __future__ import annotations

from pathlib import Path

from mindspeed_rl.metrics.metric_set import Mean, MetricSet
from mindspeed_rl.rollout.engine import InferenceEngine
from mindspeed_rl.rollout.graph_sizes import read_history, write_history
from mindspeed_rl.rollout.step_loop import StepStats


def take_stats(engine: InferenceEngine) -> StepStats:
    """Return the engine's counters since the last call and reset them. Local."""
    stats, engine.stats = engine.stats, StepStats()
    return stats


def step_metrics(stats: StepStats, data_parallel: bool) -> MetricSet:
    """Compute the time and idling of the engine's steps, weighted by steps. Local.

    With data-parallel ranks in an engine, the metrics also have the cost of their agreement:
    reductions per step, milliseconds of waiting for each other, and the rate of steps in which all
    wait for a prompt of one rank. These are NaN where the engine reduces by itself.
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
    """Add the decode steps of this rank's engine to the history file of the run.

    Data-parallel ranks of an engine run the batch of their fullest rank, which is known from our
    packed reduction alone: without it nothing is recorded.

    Args:
        folder: Value of ``--output-dir``.
        stats: Counters of one pass of generation.
        data_parallel: Number of ranks of an engine that have requests of their own.
    """
    if data_parallel > 1 and not stats.reductions:
        return
    write_history(folder, read_history(folder) + stats.running)
