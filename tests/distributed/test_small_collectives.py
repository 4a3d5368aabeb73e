"""Small sums and gathers equal the backend's own, whichever way they take."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.spawn import run_ranks

from mindspeed_rl.launch.bootstrap import World

pytestmark = pytest.mark.distributed

# one number; fewer numbers than ranks; one that ranks cannot share evenly; none
SHAPES = ((1,), (2,), (7, 3), (0,))


def compare_with_the_backend(world: World) -> int:
    import torch
    import torch.distributed as dist

    from mindspeed_rl.parallel import small_collectives
    from mindspeed_rl.parallel.small_collectives import all_reduce_sum, gather_rows

    others = dist.new_group(list(range(1, world.size)))
    groups = [None, others] if world.rank else [None]
    dtypes, compared = (torch.int64, torch.int32), 0
    for direct_bytes in (small_collectives.DIRECT_BYTES, 0):
        small_collectives.DIRECT_BYTES = direct_bytes
        for group, shape, dtype in ((g, s, d) for g in groups for s in SHAPES for d in dtypes):
            generator = torch.Generator().manual_seed(world.rank)
            info = torch.iinfo(dtype)
            mine = torch.randint(info.min, info.max, shape, dtype=dtype, generator=generator)
            kept, total = mine.clone(), mine.clone()
            dist.all_reduce(total, group=group)
            rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
            dist.all_gather(rows, mine, group=group)
            summed, gathered = all_reduce_sum(mine, group), gather_rows(mine, group)
            assert summed.dtype is dtype and torch.equal(summed, total), (shape, dtype)
            assert torch.equal(gathered, torch.stack(rows)), (shape, dtype)
            assert torch.equal(mine, kept)
            compared += 1
    return compared


def test_sums_and_gathers_are_those_of_the_backend(tmp_path: Path) -> None:
    """Sums wrap around as the backend's do, so any integers compare."""
    cases = 2 * len(SHAPES) * 2
    found = run_ranks(compare_with_the_backend, 3, work_dir=tmp_path)
    assert found == [cases, 2 * cases, 2 * cases]
