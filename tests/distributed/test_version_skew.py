"""One engine of several restarts: all ranks move and prove all weights, and none waits alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from support.spawn import run_ranks
from support.table_engine import CompareWeights, TableEngine, first_table

from mindspeed_rl.launch.bootstrap import World

pytestmark = pytest.mark.distributed


def skewed_world(world: World) -> list[tuple[int, int, list[str], bool]]:
    """Syncs to versions 1, 2, 2 with a new engine on the last rank, 3 with garbage there, and 3.

    Returns:
        After each: full proofs, sampled ones, lines, and whether the engine has the trainer's bits.
    """
    from mindspeed_rl.weights.sync import WeightPath, WeightSync, versions_of_ranks
    from mindspeed_rl.weights.traffic import RankTraffic

    trainer, proof = first_table(), CompareWeights()
    lines: list[str] = []

    def broadcast(read: Any, engine: Any) -> None:
        weights = engine.weight_views()["table"]
        weights.copy_(read["table"])
        dist.broadcast(weights, 0)

    sync = WeightSync(
        WeightPath("broadcast", broadcast, RankTraffic(0, 1, 1, 0, 0, 0, 1)),
        cast(Any, proof),
        lambda: {"table": trainer},
        0,
        gather_versions=versions_of_ranks,
        log=lines.append,
    )
    found = []

    def run(engine: TableEngine, version: int) -> None:
        sync.run(cast(Any, engine), version)
        equal = torch.equal(engine.weights, trainer) and engine.weights_version == version
        found.append((proof.num_calls, len(proof.samples), list(lines), equal))

    last = world.rank == world.size - 1
    engine = TableEngine()
    run(engine, 1)
    run(engine, 2)
    engine = TableEngine() if last else engine
    run(engine, 2)
    if last:
        engine.weights.fill_(float("nan"))
        engine.weights_version = 77
    run(engine, 3)
    run(engine, 3)
    return found


def test_an_engine_that_restarts_gets_all_weights_from_all_ranks(tmp_path: Path) -> None:
    for found in run_ranks(skewed_world, 3, work_dir=tmp_path):
        assert [(full, sampled) for full, sampled, _, _ in found] == [
            *((1, 0), (1, 1)),  # the first in full, the second by a sample
            *((2, 1), (3, 1)),  # both after something unexpected in full
            (3, 1),  # all have the version: nothing to do
        ]
        lines = found[-1][2]
        assert [len(told) for _, _, told, _ in found] == [0, 0, 1, 2, 2]
        assert "ranks 2 (1 of 3) hold weights of version none" in lines[0]
        assert (
            "ranks 2 (1 of 3) hold weights of version 77, where the latest sync left 2" in lines[1]
        )
        assert all(equal for *_, equal in found)
