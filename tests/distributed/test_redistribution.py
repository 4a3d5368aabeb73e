"""Real ranks: every pair of rollout and training layouts equals gather-and-scatter, bit for bit.

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
    import torch
    import torch.distributed as dist
    from support.sample_world import COLUMNS, Case, layout_of

    from mindspeed_rl.samples.exchange import Redistribution
    from mindspeed_rl.samples.routes import AXES

    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    draw = random.Random(world.size)
    moved = 0
    parts: list[tuple[Case, Redistribution]] = []
    held: list[dict[tuple[int, str], torch.Tensor]] = []
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
        cache = case.cache(world.rank)
        part = Redistribution(cache, case.samples, COLUMNS, hops[world.rank])
        part.run(mine.__getitem__)
        moved += part.sent_bytes
        sent = [i for hop in hops[world.rank] for items in hop.sends.values() for i in items]
        assert part.sent_bytes == 4 * case.words(sent)
        assert len(hops[world.rank]) <= len(AXES)
        parts.append((case, part))
        held.append(
            {
                (i, c.name): cache.read(c, s.key, s.weights_version)
                for i, s in enumerate(case.samples)
                for c in COLUMNS
                if case.holds(world.rank, i)
            }
        )
    everyone: list[list[dict[tuple[int, str], torch.Tensor]]] = [[]] * world.size
    dist.all_gather_object(
        everyone, held
    )  # the reference: everything everywhere, take what is yours
    for (case, part), *of_ranks in zip(parts, *everyone, strict=True):
        gathered = {key: tensor for of_rank in of_ranks for key, tensor in of_rank.items()}
        for i in range(len(case.lengths)):
            for column in COLUMNS if case.needs(world.rank, i) else ():
                found, expected = part.read(i, column), gathered[i, column.name]
                assert found.dtype is expected.dtype and found.equal(expected), (case, i)
    return len(parts), moved


@pytest.mark.parametrize(
    ("num_ranks", "num_cases"),
    [
        (4, 50),
        pytest.param(6, 112, marks=pytest.mark.slow),  # data-parallel sizes 2 and 3
        pytest.param(8, 140, marks=pytest.mark.slow),
    ],
)
def test_every_pair_of_layouts(tmp_path: Path, num_ranks: int, num_cases: int) -> None:
    found = run_ranks(exchange_world, num_ranks, work_dir=tmp_path)
    assert [count for count, _ in found] == [num_cases] * num_ranks
    assert sum(moved for _, moved in found) > 0
