"""Requests move between vLLM engines as tokens: the samples are those of engines left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.rebalance_world import COUNTS, MODES, Run, rebalance_world
from support.spawn import run_ranks

from mindspeed_rl.core.types import Completion

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def union(runs: list[dict[str, Run]], mode: str, tp: int = 1) -> dict[int, Completion]:
    """The completions of all engines; ranks of one engine have the same."""
    found: dict[int, Completion] = {}
    for rank, by_mode in enumerate(runs):
        mine = by_mode[mode].completions
        if rank % tp:
            assert mine == runs[rank - 1][mode].completions
            continue
        assert not found.keys() & mine.keys(), "a sample is there twice"
        found |= mine
    return found


def check(runs: list[dict[str, Run]], tp: int = 1) -> None:
    wanted = union(runs, "off", tp)
    assert sorted(wanted) == list(range(sum(COUNTS)))
    for mode in ("waiting", "all"):
        found = union(runs, mode, tp)
        assert found.keys() == wanted.keys(), "nothing is lost"
        for sample_id, completion in found.items():
            other = wanted[sample_id]
            assert completion.token_ids == other.token_ids, (mode, sample_id)
            assert completion.logprobs == pytest.approx(other.logprobs, abs=2e-5)
            assert completion.finish_reason == other.finish_reason
    shaken, control = union(runs, "shaken", tp), union(runs, "shaken with other seeds", tp)
    for sample_id, completion in wanted.items():
        assert shaken[sample_id].token_ids == completion.token_ids, sample_id
        assert shaken[sample_id].logprobs == pytest.approx(completion.logprobs, abs=2e-5)
    assert sum(run["shaken"].num_running_moved for run in runs) > sum(COUNTS), (
        "most began before they moved"
    )
    assert any(control[i].token_ids != c.token_ids for i, c in wanted.items()), "noise matters"
    for sample_id, completion in union(runs, "last first", tp).items():
        assert wanted[sample_id].token_ids == completion.token_ids, "the order of starting matters"
        assert wanted[sample_id].logprobs == pytest.approx(completion.logprobs, abs=2e-5)
    orders = [[run[mode].stats.running for run in runs] for mode in ("off", "last first")]
    assert orders[0] != orders[1], "more requests than places, so their order decides who waits"
    steps = {mode: max(run[mode].stats.steps for run in runs) for mode in MODES}
    moved = {mode: sum(run[mode].stats.moved for run in runs) for mode in MODES}
    print(f"decode steps of the slowest engine {steps}, requests moved {moved}")
    assert moved["off"] == 0 < moved["waiting"]
    running_moved = runs[0]["all"].stats.moved_tokens > runs[0]["waiting"].stats.moved_tokens
    assert running_moved, "requests that had begun moved as well"
    assert steps["waiting"] < steps["off"] and steps["all"] < steps["off"]


def test_a_skewed_set_takes_fewer_steps_and_gives_the_same_samples(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Two engines of one rank."""
    check(run_ranks(rebalance_world, 2, work_dir=tmp_path, args=(str(tiny_model), [])))


def test_ranks_of_an_engine_take_and_give_alike(tiny_model: Path, tmp_path: Path) -> None:
    """Two engines of two ranks."""
    args = (str(tiny_model), ["--rollout-tp", "2"])
    check(run_ranks(rebalance_world, 4, work_dir=tmp_path, args=args), tp=2)
