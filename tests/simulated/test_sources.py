"""Who serves whom: every destination once, near before far, loads as level as they can be."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mindspeed_rl.weights.sources import RegionDemand, SourceAssignment, assign_sources


@st.composite
def progressions(draw: st.DrawFn) -> range:
    """Ranks as an arithmetic progression."""
    start, step, count = (draw(st.integers(*b)) for b in ((0, 30), (1, 9), (1, 24)))
    return range(start, start + step * count, step)


def ranks_of(several: tuple[range, ...]) -> list[int]:
    """Each once, ascending."""
    return sorted({rank for ranks in several for rank in ranks})


SEVERAL = st.lists(progressions(), min_size=1, max_size=3).map(tuple)
NODES, TURNS = st.integers(1, 40), st.integers(0, 1000)


def slices_of(assigned: SourceAssignment) -> list[dict[int, tuple[int, int]]]:
    """Source and hop of each destination, by slice."""
    slices: list[dict[int, tuple[int, int]]] = [{} for _ in range(sum(assigned.num_slices))]
    columns = (column.tolist() for column in assigned[:4])
    for number, hop, src, dst in zip(*columns, strict=True):
        assert dst not in slices[number] and (src == dst) == (hop == 0)
        slices[number][dst] = src, hop
    return slices


def assign_one(
    sources: tuple[range, ...],
    destinations: tuple[range, ...],
    node: int,
    rotation: int,
    relay: bool = False,
) -> dict[int, tuple[int, int]]:
    """Source and hop of each destination of one rectangle, in its first slice."""
    assigned = assign_sources(sources, (RegionDemand(destinations),), node, rotation, relay=relay)
    return slices_of(assigned)[0]


@given(SEVERAL, SEVERAL, NODES, TURNS, st.booleans())
@settings(max_examples=600, deadline=None)
@example((range(2),), (range(32),), 8, 0, True)  # most destinations have no source on their node
@example((range(2),), (range(8, 30, 4), range(9, 30, 4)), 8, 0, True)  # two runs of one node
@example((range(0, 32, 4),), (range(32),), 8, 3, False)
@example((range(3),), (range(7),), 100, 1, False)  # one node, sizes that do not divide
@example((range(3, 4),), (range(3, 4),), 8, 5, True)
@example((range(3, 4),), (range(17, 18),), 8, 5, True)
def test_the_choice_prefers_itself_then_its_node(
    sources: tuple[range, ...],
    destinations: tuple[range, ...],
    node: int,
    rotation: int,
    relay: bool,
) -> None:
    owner_ranks = set(ranks_of(sources))
    nodes = {rank // node for rank in owner_ranks}
    assigned = assign_one(sources, destinations, node, rotation, relay)
    leaders = dict(assigned)
    entering: Counter[int] = Counter()
    for dst in ranks_of(destinations):
        src, hop = assigned.pop(dst)
        if dst in owner_ranks:
            assert (src, hop) == (dst, 0)
        elif dst // node in nodes:
            assert src in owner_ranks and src // node == dst // node and hop == 1
        elif hop == 2:
            assert src // node == dst // node and leaders[src][1] == 1
        else:
            assert src in owner_ranks and hop == 1
            entering[dst // node] += 1
    assert not assigned, "nobody else is served"
    if relay:
        assert set(entering.values()) <= {1}, "a rectangle enters a node once"


@given(SEVERAL, SEVERAL, NODES, TURNS)
@settings(max_examples=300, deadline=None)
def test_the_largest_load_is_the_least_possible(
    sources: tuple[range, ...], destinations: tuple[range, ...], node: int, rotation: int
) -> None:
    """After each node has served its own in turns, far destinations fill up the smallest loads."""
    owner_ranks, needing_ranks = ranks_of(sources), ranks_of(destinations)
    near = {h: 0 for h in owner_ranks}
    far = 0
    for number in {d // node for d in needing_ranks}:
        local = [h for h in owner_ranks if h // node == number]
        needing = [d for d in needing_ranks if d // node == number and d not in owner_ranks]
        far += 0 if local else len(needing)
        for i, h in enumerate(local):
            near[h] = len(needing) // len(local) + (i < len(needing) % len(local))
    level = max(near.values())
    while sum(max(0, level - load) for load in near.values()) < far:
        level += 1
    assigned = assign_one(sources, destinations, node, rotation)
    if far or level:
        sent = Counter(src for src, hop in assigned.values() if hop)
        assert max(sent.values(), default=0) <= level


@pytest.mark.parametrize("relay", [False, True])
def test_turns_share_what_does_not_divide(relay: bool) -> None:
    """Two destinations of four sources: over four tensors everybody sends equally often."""
    load: Counter[int] = Counter()
    demands = (RegionDemand((range(64, 66),)),)
    for rotation in range(4):
        for found in slices_of(assign_sources((range(4),), demands, 8, rotation, relay=relay)):
            load.update(source for source, hop in found.values() if hop == 1)
    assert len(load) == 4 and len(set(load.values())) == 1


def loads_of(
    sources: tuple[range, ...], demands: tuple[RegionDemand, ...], node: int, num_rotations: int
) -> Counter[int]:
    """What each source sends in ``num_rotations`` turns."""
    load: Counter[int] = Counter(dict.fromkeys(ranks_of(sources), 0))
    for rotation in range(num_rotations):
        shared = assign_sources(sources, demands, node, rotation, num_rotations)
        found = iter(slices_of(shared))
        for rectangle, count in zip(demands, shared.num_slices, strict=True):
            for part in islice(found, count):
                assert sorted(part) == ranks_of(rectangle.destinations)
                for source, hop in part.values():
                    load[source] += rectangle.size // count * (hop > 0)
    return load


@given(st.integers(1, 8), st.integers(1, 12), st.integers(1, 3), st.integers(1, 6))
@settings(max_examples=200, deadline=None)
@example(8, 1, 1, 1)  # one matrix, eight owner ranks, one destination
@example(6, 4, 1, 2)
def test_few_turns_are_made_up_for_by_slices(
    num_owner_ranks: int, num_destinations: int, num_rectangles: int, num_rotations: int
) -> None:
    """840 elements have slices of equal size; with all far, nobody sends 1.25 of the mean."""
    first = 100
    demands = tuple(
        RegionDemand((range(first + i, first + i + num_destinations),), 840, may_slice=True)
        for i in range(num_rectangles)
    )
    load = loads_of((range(num_owner_ranks),), demands, 8, num_rotations)
    mean = 840 * num_destinations * num_rectangles * num_rotations / num_owner_ranks
    assert sum(load.values()) == mean * num_owner_ranks
    assert max(load.values()) <= 1.25 * mean


def test_what_must_come_from_one_source_spares_it_elsewhere() -> None:
    """Rank 0 serves its node; the other rectangle comes from the other holder."""
    demands = (RegionDemand((range(8, 9),)), RegionDemand((range(1, 2),)))
    for rotation in range(4):
        assert loads_of((range(0, 8, 4),), demands, 2, 1) == {0: 1, 4: 1}, rotation


def test_leaders_of_a_node_take_turns() -> None:
    leaders = set()
    for rotation in range(8):
        assigned = assign_one((range(2),), (range(8, 16),), 8, rotation, relay=True)
        leaders |= {d for d, (_, hop) in assigned.items() if hop == 1}
    assert leaders == set(range(8, 16))
