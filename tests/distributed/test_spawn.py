"""The harness itself: a failure on a rank is told, a hang ends, nothing is left running."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from support.spawn import RankError, run_ranks

from mindspeed_rl.launch.bootstrap import World

pytestmark = [pytest.mark.distributed, pytest.mark.alone]


def sum_of_ranks(world: World, base: int) -> tuple[int, float]:
    import torch
    import torch.distributed as dist

    total = torch.tensor(float(world.rank + base))
    dist.all_reduce(total)
    return world.rank, float(total)


def raise_on_last_rank(world: World) -> None:
    import torch.distributed as dist

    if world.rank == world.size - 1:
        raise LookupError("the reason")
    dist.barrier()


def hang_on_first_rank(world: World) -> None:
    while world.rank == 0:
        time.sleep(0.1)


def die(world: World, pid_folder: str) -> None:
    (Path(pid_folder) / f"{world.rank}.pid").write_text(str(os.getpid()))
    if world.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60.0)


def test_results_come_in_rank_order(tmp_path: Path) -> None:
    assert run_ranks(sum_of_ranks, 2, work_dir=tmp_path, args=(10,)) == [(0, 21.0), (1, 21.0)]


def test_failure_names_the_rank_and_its_reason(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="failed on rank 1") as error:
        run_ranks(raise_on_last_rank, 2, work_dir=tmp_path)
    assert "LookupError: the reason" in str(error.value)


@pytest.mark.slow
def test_hang_ends_with_a_stack_dump(tmp_path: Path) -> None:
    with pytest.raises(RankError) as error:
        run_ranks(hang_on_first_rank, 2, work_dir=tmp_path, timeout_s=15.0)
    assert "Timeout (0:00:15)!" in str(error.value)
    assert "in hang_on_first_rank" in str(error.value)


def test_death_of_a_rank_ends_its_peers(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 0.*SIGKILL") as error:
        run_ranks(die, 2, work_dir=tmp_path, args=(str(tmp_path),), timeout_s=50.0)
    assert error.value.returncodes[0] == -signal.SIGKILL
    for file in tmp_path.glob("*.pid"):
        assert not Path(f"/proc/{file.read_text()}").exists()
