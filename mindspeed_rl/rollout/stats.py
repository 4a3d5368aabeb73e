"""Counters and metrics of the engine's steps, and the history that graph sizes are chosen from."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from mindspeed_rl.core.graph_sizes import read_history, write_history
from mindspeed_rl.metrics.jsonl import FULL_DISK
from mindspeed_rl.metrics.metric_set import Max, Mean, MetricSet
from mindspeed_rl.rollout.drafts import DraftLedger


@dataclass(slots=True)
class StepStats:
    """Counters of the engine's steps on this rank.

    Attributes:
        steps: Steps of the engine, dummy steps included.
        dummy_steps: Steps in which this rank had no request.
        seconds: Time of all steps.
        sync_seconds: Part of ``seconds`` spent in our packed reduction, reading its result
            included; 0 without it.
        reductions: Number of packed reductions; 0 without them.
        rebalance_seconds: Time of moving requests between engines, waiting for the others included.
        moved: Requests that left this rank for another engine.
        moved_tokens: Tokens of these requests, prompts included, that other engines read again.
        prompt_steps: Steps in which any rank of the engine read a prompt; 0 without our reduction.
        running: Sequences in a decode step (where ranks agree, on the fullest one, and with drafts
            their tokens) -> steps.
        preemptions: Times that a request lost its place in the key/value cache to others; its
            tokens are read again.
        prompt_tokens: Tokens that the requests which ended here began with.
        cached_tokens: Those of them that the prefix cache had.
        resumed: Requests that went on after a pause with what the cache had of them.
        kept_cached_tokens: Tokens of them that were not read again because they had kept it.
        sampled_tokens: Tokens of the responses that ended or left here, sampled here.
        response_steps: Steps of all responses that may have drafts, each counted for itself.
        drafts: Drafts of at least one token.
        drafted_tokens: Tokens of all drafts.
        kept_tokens: Tokens of them that were sampled.
        draft_seconds: Part of ``seconds`` in which drafts were sought.
        saved_steps: Steps that the engine did not need to make because of them.
        cache_use: Largest share of the key/value cache in use after a step, in [0, 1].
    """

    steps: int = 0
    dummy_steps: int = 0
    seconds: float = 0.0
    sync_seconds: float = 0.0
    reductions: int = 0
    rebalance_seconds: float = 0.0
    moved: int = 0
    moved_tokens: int = 0
    prompt_steps: int = 0
    running: Counter[int] = field(default_factory=Counter)
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    resumed: int = 0
    kept_cached_tokens: int = 0
    sampled_tokens: int = 0
    response_steps: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    kept_tokens: int = 0
    draft_seconds: float = 0.0
    saved_steps: int = 0
    cache_use: float = 0.0


def step_metrics(stats: StepStats, data_parallel: bool) -> MetricSet:
    """Compute the time and idling of the engine's steps, and the use of its cache. Local.

    Time and idling are weighted by steps.

    With data-parallel ranks in an engine, the metrics also have the cost of their agreement:
    reductions per step, milliseconds of waiting for each other, and the rate of steps in which all
    wait for a prompt of one rank. These are NaN where the engine reduces by itself.
    """
    metrics = MetricSet(
        {
            "rollout/steps": Mean.of([stats.steps]),
            "throughput/engine_ms_per_step": Mean(1e3 * stats.seconds, stats.steps),
            "rollout/kv_cache_use_max": Max(stats.cache_use),
            "rollout/prefix_cache_hit_rate": Mean(stats.cached_tokens, stats.prompt_tokens),
        }
    )
    if stats.response_steps:
        metrics |= {
            "rollout/draft_tokens": Mean(stats.drafted_tokens, stats.drafts),
            "rollout/draft_kept_tokens": Mean(stats.kept_tokens, stats.drafts),
            "rollout/draft_step_share": Mean(stats.drafts, stats.response_steps),
            "rollout/steps_per_token": Mean(stats.response_steps, stats.sampled_tokens),
            "rollout/draft_saved_steps": Mean(stats.saved_steps, stats.steps + stats.saved_steps),
            "rollout/draft_search_share": Mean(stats.draft_seconds, stats.seconds),
        }
    if data_parallel:
        ours = float(stats.steps) if stats.reductions else 0.0
        metrics["rollout/idle_step_rate"] = Mean(stats.dummy_steps, stats.steps)
        metrics["rollout/dp_reductions_per_step"] = Mean(stats.reductions, ours)
        metrics["rollout/prompt_step_rate"] = Mean(stats.prompt_steps, ours)
        metrics["throughput/dp_sync_ms_per_step"] = Mean(1e3 * stats.sync_seconds, ours)
    return metrics


def add_drafts(stats: StepStats, ledger: DraftLedger, saved: int) -> None:
    """Add the drafts of a call of the engine, and the steps that they saved, to its counters."""
    stats.response_steps += ledger.steps
    stats.drafts += ledger.drafts
    stats.drafted_tokens += ledger.drafted
    stats.kept_tokens += ledger.kept
    stats.draft_seconds += ledger.search_seconds
    stats.saved_steps += saved


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
    try:
        write_history(folder, read_history(folder) + stats.running)
    except OSError as error:  # on a full disk the file lacks a pass, and its steps stay true
        if error.errno not in FULL_DISK:
            raise
