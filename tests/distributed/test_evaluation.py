"""Evaluation on several ranks counts every prompt once, whatever the size of the set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from support.spawn import run_ranks

from mindspeed_rl.launch.bootstrap import World

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SIZES = (1, 7, 8, 9)


def evaluate_sets(world: World, output: str, sizes: Sequence[int]) -> list[tuple[Any, list[int]]]:
    """Rank function: evaluate sets of some sizes, every other response right.

    Returns:
        Per size the result, and the prompts that this rank answered greedily.
    """
    from support.rl_run import Answers, answering_run

    from mindspeed_rl.generation.evaluate import evaluate

    found = []
    for size in sizes:
        rows = [(str(i), "stop", str(i) if i % 2 else "no") for i in range(size)]
        flags = "--grpo-prompts-per-step 4 --rl-eval-samples 2 --rl-eval-temperature 0.5"
        folder = Path(output) / f"{size}-{world.rank}"
        run = answering_run(folder, rows, ["math"], flags, world)
        prompts, dataset = run.config.prompts, run.data.held_out[""]
        result = evaluate(run.rollouts, run.scheduler, prompts, dataset, step=0, version=0)
        asked, _ = cast(Answers, run.rollouts.engine).asked[0]
        found.append((result.metrics() | {"eval/time_s": 0.0}, [r.sample_id for r in asked]))
    return found


def test_sets_that_the_ranks_cannot_share_evenly(tmp_path: Path) -> None:
    """Four ranks with an engine each, some of them without a prompt."""
    ranks = run_ranks(evaluate_sets, 4, work_dir=tmp_path, args=(str(tmp_path), SIZES))
    for size, *results in zip(SIZES, *ranks, strict=True):
        metrics, asked = zip(*results, strict=True)
        assert sorted(i for ids in asked for i in ids) == list(range(size))
        assert all(found == metrics[0] for found in metrics), "equal on all ranks"
        assert metrics[0]["eval/num_prompts"] == size and metrics[0]["eval/num_unscored"] == 0
        right = size // 2 / size
        for name in ("eval/accuracy", "eval/accuracy_lenient", "eval/reward", "eval/mean@2"):
            assert metrics[0][name] == pytest.approx(right), name
