"""Who writes an export: one rank where all nodes see its directory, else one of each node."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.spawn import run_ranks

from mindspeed_rl.launch.bootstrap import World

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def writers(world: World, shared: str, private: str) -> tuple[list[int], list[int]]:
    """Of a directory that both nodes see, and of one that each node has for itself."""
    from mindspeed_rl.checkpoint.writers import export_writers

    own = Path(private) / f"node{world.rank}" / "deeper"
    targets = (Path(shared) / "hf", own / "hf")
    both, each = (export_writers(t, world.rank, world.size, ranks_per_node=1) for t in targets)
    return list(both), list(each)


def test_every_node_without_the_directory_writes_its_own_copy(tmp_path: Path) -> None:
    """Two nodes of one rank."""
    shared, private = tmp_path / "shared", tmp_path / "private"
    found = run_ranks(writers, 2, work_dir=tmp_path, args=(str(shared), str(private)))
    assert found == [([0], [0, 1])] * 2
    assert not list(shared.iterdir()), "no marker is left"
    assert [p.name for p in private.iterdir()] == ["node0"], "nothing is made where nobody writes"
