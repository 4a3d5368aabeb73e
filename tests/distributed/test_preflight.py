"""The doctor's collectives on gloo ranks: groups that work, and one that hangs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.spawn import RankError, run_ranks

from mindspeed_rl.launch.bootstrap import World

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.alone]
LIMIT_S = 6.0


def preflight_world(world: World, folder: str, absent: str) -> list[tuple[str, str]]:
    """Groups of pairs and of everyone; the last rank never comes to the group ``absent``."""
    import torch.distributed as dist

    from mindspeed_rl.launch import preflight
    from mindspeed_rl.platforms.cpu import CpuPlatform

    store = dist.FileStore(f"{folder}/store", world.size)
    everyone = tuple(range(world.size))
    pairs = tuple((r, r + 1) for r in range(0, world.size, 2))
    groups = {"world": (everyone,), "pair": pairs}

    def check(
        group: dist.ProcessGroup, ranks: Sequence[int], rank: int, device: torch.device
    ) -> None:
        if absent == "pair" and len(ranks) == 2 and rank == world.size - 1:
            time.sleep(60)
        exchange(group, ranks, rank, device)

    exchange, preflight.exchange, preflight.GRACE_S = preflight.exchange, check, 1.0
    if absent == "group creation" and world.rank == world.size - 1:
        time.sleep(60)
    rows = preflight.Preflight(world, CpuPlatform(), store, groups, LIMIT_S).run()
    if rows:
        Path(folder, "rows").write_text("\n".join(row.what for row in rows))
    return [(row.status.value, row.what) for row in rows]


def test_groups_that_work_are_green(tmp_path: Path) -> None:
    first, *others = run_ranks(preflight_world, 4, work_dir=tmp_path, args=(str(tmp_path), ""))
    assert others == [[], [], []]
    assert [status for status, _ in first] == ["ok", "ok", "ok"]
    created, world, pair = (what for _, what in first)
    assert created == "4 ranks on 1 host meet"
    assert world.startswith("world: 1 x 4 ranks; all-reduce and all-to-all-v right")
    assert pair.startswith("pair: 2 x 2 ranks;")


def test_a_group_that_hangs_is_named_and_ends_its_ranks(tmp_path: Path) -> None:
    """Ranks 2 and 3 are stuck; rank 0, whose pair works, tells."""
    with pytest.raises(RankError) as ended:
        run_ranks(preflight_world, 4, work_dir=tmp_path, args=(str(tmp_path), "pair"))
    assert ended.value.returncodes[2:] == (1, 1)
    words = "pair of ranks 2, 3: no answer in 6 s; all of its ranks are in it"
    assert words in (tmp_path / "rows").read_text()


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    words = "group creation of ranks 0, 1, 2, 3: .*; not in it: rank 3"
    with pytest.raises(RankError, match=words):
        run_ranks(preflight_world, 4, work_dir=tmp_path, args=(str(tmp_path), "group creation"))
