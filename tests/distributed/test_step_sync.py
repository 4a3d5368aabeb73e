"""Data-parallel ranks of an engine agree in one reduction per step."""

from __future__ import annotations

from pathlib import Path

import pytest
from make_tiny_model import write_tiny_model
from support.spawn import run_ranks
from support.step_sync_world import LOADS, Run, step_sync_world

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def _check(runs: list[dict[str, Run]], engines: int) -> None:
    """Same samples as the unpatched engine, and fewer reductions, on every rank."""
    size = len(runs) // engines
    for rank, by_name in enumerate(runs):
        own = runs[rank // size * size :][:size]
        longest = max(len(c.token_ids) for r in own for c in r["engine"].completions)
        before = by_name["engine"]
        assert len(before.completions) == LOADS[rank]
        assert before.stats.reductions == 0
        for name, interval in (("packed", 1), ("packed every 3", 3)):
            after = by_name[name]
            assert after.completions == before.completions, (rank, name)
            steps = after.stats.steps
            assert after.reductions == after.stats.reductions == steps, "one per step"
            # one step without work tells all that none is left; they look at every third
            assert steps == -(-(before.stats.steps + 1) // interval) * interval, (rank, name)
            assert after.reductions < before.reductions, (rank, name)
        # the batch of each step, and after it whether anyone is left
        assert before.reductions == 2 * before.stats.steps + 1
        assert longest <= before.stats.steps <= longest + 1


def test_samples_are_those_of_the_unpatched_engine(tmp_path: Path) -> None:
    """Four ranks of one engine with 7, 0, 1 and 3 requests."""
    model = write_tiny_model(tmp_path / "model", family="qwen3_moe")
    flags = ["--rollout-dp", "4", "--rollout-ep", "4", "--rollout-dp-sync", "engine"]
    runs = run_ranks(step_sync_world, 4, work_dir=tmp_path, args=(str(model), flags))
    _check(runs, engines=1)
    assert len({by_name["packed"].stats.steps for by_name in runs}) == 1, "in lock-step"
    idle = runs[1]["packed"].stats
    assert idle.dummy_steps == idle.steps
    # graphs are as large as the fullest rank needs, on all of them
    assert idle.running == runs[0]["packed"].stats.running
    assert idle.running[LOADS[0]] and idle.prompt_steps >= 1


def test_replicas_with_data_parallel_ranks_share_a_world(tmp_path: Path) -> None:
    """Two engines of two ranks: each agrees within itself; vLLM alone refuses to build them."""
    model = write_tiny_model(tmp_path / "model", family="qwen3_moe")
    flags = ["--rollout-dp", "2", "--rollout-ep", "2", "--rollout-dp-sync", "engine"]
    runs = run_ranks(step_sync_world, 4, work_dir=tmp_path, args=(str(model), flags))
    _check(runs, engines=2)
    for first, second in ((0, 1), (2, 3)):
        assert runs[first]["packed"].stats.steps == runs[second]["packed"].stats.steps
