"""The workers of the dispatch benchmark: what is handed over is right, bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.spawn import run_ranks

from mindspeed_rl.bootstrap import World

TOOLS = str(Path(__file__).resolve().parents[2] / "tools")
if TOOLS not in sys.path:
    sys.path.insert(0, TOOLS)

from bench.dispatch_ways import AGREE, MOVE, Batch, Worker  # noqa: E402

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def _hand_over(world: World) -> bool:
    worker = Worker(world.rank, world.size)
    for steps, shift in (((1, 2), AGREE), ((3, 4), MOVE)):
        batches = [Batch(world.size, 1, step) for step in steps]
        times = worker.spmd(batches, shift)
        assert len(times) == 2 and all(began < done for began, done in times)
        worker.check(batches[-1], shift)
    batch = Batch(world.size, 1, 5)
    worker.make(batch)
    worker.redistribute(batch, MOVE)
    with pytest.raises(AssertionError):
        worker.check(batch, AGREE)
    ((began, done),) = worker.bare(batch, 1)
    return began < done


def test_every_worker_gets_the_samples_of_the_one_before_it(tmp_path: Path) -> None:
    assert run_ranks(_hand_over, 3, work_dir=tmp_path) == [True] * 3
