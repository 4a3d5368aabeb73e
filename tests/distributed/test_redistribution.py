"""Real ranks: samples get from every rollout layout to every training layout, bit for bit.

What the plans say is what moves: bytes are counted at the wire.
"""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import pytest
from support.spawn import run_ranks

from mindspeed_rl.launch.bootstrap import World

pytestmark = pytest.mark.distributed


def exchange_world(world: World) -> tuple[int, int]:
    """Rank function: all layouts of this world; how many cases, and the bytes that moved."""
    import torch.distributed as dist
    from support.sample_world import COLUMNS, Case, layout_of

    from mindspeed_rl.samples.exchange import AXES, Redistribution

    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    draw = random.Random(world.size)
    moved, count = 0, 0
    divisors = [n for n in range(1, world.size + 1) if world.size % n == 0]
    grids = [g for g in product(divisors, repeat=3) if world.size % (g[0] * g[1] * g[2]) == 0]
    for (tp, pp, cp), engine_tp, mirrored in product(grids, divisors, (True, False)):
        if engine_tp == 1 and not mirrored:
            continue
        layout, size = layout_of(world.size, tp, pp, cp), draw.choice((0, 1, 7))
        case = Case(
            layout,
            engine_tp,
            mirrored,
            tuple(draw.choice((0, 1, 5, 40)) for _ in range(size)),
            tuple(draw.randrange(world.size // engine_tp) for _ in range(size)),
            tuple(draw.randrange(layout.dp) for _ in range(size)),
        )
        hops = [case.hops(rank) for rank in range(world.size)]
        for ranks in {hop.peers for of_rank in hops for hop in of_rank} - groups.keys():
            groups[ranks] = dist.new_group(list(ranks))
        mine = {hop.axis: groups[hop.peers] for hop in hops[world.rank]}
        part = Redistribution(case.cache(world.rank), case.samples, COLUMNS, hops[world.rank])
        part.run(mine.__getitem__)
        case.check(world.rank, part)
        moved += part.sent_bytes
        sent = [i for hop in hops[world.rank] for items in hop.sends.values() for i in items]
        assert part.sent_bytes == 4 * case.words(sent)
        assert len(hops[world.rank]) <= len(AXES)
        count += 1
    return count, moved


def test_every_pair_of_layouts(tmp_path: Path) -> None:
    """Other sizes are simulated in tests/unit/samples/test_redistribution.py."""
    found = run_ranks(exchange_world, 4, work_dir=tmp_path)
    assert [count for count, _ in found] == [50] * 4
    assert sum(moved for _, moved in found) > 0
