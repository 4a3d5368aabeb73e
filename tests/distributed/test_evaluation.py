"""Evaluation on several ranks counts every prompt once, whatever the size of the set."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.answering_run import evaluation_world
from support.spawn import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SIZES = (1, 7, 8, 9)


def test_sets_that_the_ranks_cannot_share_evenly(tmp_path: Path) -> None:
    """Four ranks with an engine each, some of them without a prompt."""
    ranks = run_ranks(evaluation_world, 4, work_dir=tmp_path, args=(str(tmp_path), SIZES))
    for size, *results in zip(SIZES, *ranks, strict=True):
        metrics, asked = zip(*results, strict=True)
        assert sorted(i for ids in asked for i in ids) == list(range(size))
        assert all(found == metrics[0] for found in metrics), "equal on all ranks"
        assert metrics[0]["eval/num_prompts"] == size and metrics[0]["eval/num_unscored"] == 0
        right = size // 2 / size
        for name in ("eval/accuracy", "eval/accuracy_lenient", "eval/reward", "eval/mean@2"):
            assert metrics[0][name] == pytest.approx(right), name
