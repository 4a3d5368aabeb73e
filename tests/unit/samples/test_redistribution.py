"""Samples get from any rollout layout to any training layout, once and whole (simulated ranks)."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sample_world import COLUMNS, Case, layout_of, simulate

from mindspeed_rl.samples.columns import TOKEN_IDS
from mindspeed_rl.samples.exchange import (
    AXES,
    OwnerRanks,
    Redistribution,
    copies_moved,
    plan_gather,
)
from mindspeed_rl.samples.rollout_info import SampleKey

WORLDS = (1, 2, 3, 4, 6, 8, 12)


def grids(world: int) -> list[tuple[int, int, int]]:
    """(tp, pp, cp) that fit."""
    sizes = (1, 2, 3, 4)
    return [g for g in product(sizes, repeat=3) if world % (g[0] * g[1] * g[2]) == 0]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    world = draw(st.sampled_from(WORLDS))
    tp, pp, cp = draw(st.sampled_from(grids(world)))
    layout = layout_of(world, tp, pp, cp)
    engine_tp = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    groups = st.integers(0, world // engine_tp - 1)
    rows = draw(
        st.lists(st.tuples(st.integers(0, 9), groups, st.integers(0, layout.dp - 1)), max_size=10)
    )
    lengths, held, wanted = (tuple(row[n] for row in rows) for n in range(3))
    return Case(layout, engine_tp, draw(st.booleans()), lengths, held, wanted)


@given(cases(), st.booleans())
@settings(deadline=None, max_examples=200)
def test_every_rank_gets_what_it_trains_on_bit_for_bit(case: Case, one_node: bool) -> None:
    """Ragged, empty samples and ranks, sizes that do not divide; both ends expect the same."""
    simulate(replace(case, one_node=one_node))


@given(cases())
@settings(deadline=None, max_examples=60)
def test_the_first_leg_moves_one_copy_and_only_where_there_is_none(case: Case) -> None:
    away = [
        i
        for i, wanted in enumerate(case.destinations)
        if not any(
            case.layout.coords(rank).dp == wanted
            for rank in range(case.layout.world)
            if case.holds(rank, i)
        )
    ]
    assert simulate(case)["dp-cp"] == case.words(away)


@given(cases())
@settings(deadline=None, max_examples=100)
def test_what_a_placement_is_chosen_by_is_what_moves(case: Case) -> None:
    """The copies of all samples at all data-parallel ranks, counted without a plan of hops."""
    copies = copies_moved(case.owner_ranks, case.layout, case.stages)
    expected = sum(int(copies[i, dp]) * case.words([i]) for i, dp in enumerate(case.destinations))
    assert sum(simulate(case).values()) == expected


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 2), (2, 2)], ids=lambda n: str(n))
def test_nothing_moves_where_source_and_destination_agree(tp: int, cp: int) -> None:
    """Engines of as many ranks as trainers: each rank trains on what its engine sampled."""
    layout = layout_of(8, tp, 1, cp)
    groups = tuple(i % layout.dp for i in range(13))
    case = Case(layout, tp * cp, True, tuple(range(13)), groups, groups)
    assert all(case.hops(rank) == () for rank in range(8))
    assert simulate(case) == dict.fromkeys(AXES, 0)
    led = replace(case, mirrored=False)  # conversations: the first rank of each engine has them
    moved = simulate(led)
    total = case.words(range(13))
    assert moved == {"dp-cp": 0, "pp": 0, "cp": (cp - 1) * total, "tp": (tp - 1) * cp * total}


def test_everything_comes_to_one_rank() -> None:
    owner_ranks = OwnerRanks([0, 2, 2, 3], 1)
    hops = [plan_gather(owner_ranks, 2, 4, rank) for rank in range(4)]
    assert [hop.sends for (hop,) in hops] == [{2: (0,)}, {}, {}, {2: (3,)}]
    assert [hop.receives for (hop,) in hops] == [{}, {}, {0: (0,), 3: (3,)}, {}]
    assert all(hop.axis == "world" and hop.peers == (0, 1, 2, 3) for (hop,) in hops)
    assert plan_gather(OwnerRanks([2, 1], 2), 2, 4, 0) == ()


def test_a_sample_that_is_not_as_long_as_the_table_says_is_refused() -> None:
    case = Case(layout_of(2), 1, True, (4,), (0,), (1,))
    samples = [replace(s, num_tokens=5) for s in case.samples]
    (hop,) = case.hops(0)
    part = Redistribution(case.cache(0), samples, COLUMNS, [hop])
    with pytest.raises(RuntimeError, match="'token_ids' of sample 0 of step 5"):
        part.outgoing(hop)


def test_what_arrived_is_kept_under_its_key() -> None:
    case = Case(layout_of(2), 1, True, (4, 3), (0, 1), (1, 1))
    cache = case.cache(1)
    (hop,) = case.hops(1)
    sender = case.part(0)
    part = Redistribution(cache, case.samples, COLUMNS, [hop])
    part.take(hop, sender.outgoing(*sender.hops)[0])
    part.keep()
    assert torch.equal(cache.read(TOKEN_IDS, SampleKey(5, 0), 100), case.values(0, TOKEN_IDS))
    with pytest.raises(RuntimeError, match="written twice"):
        part.take(hop, sender.outgoing(*sender.hops)[0])
        part.keep()
