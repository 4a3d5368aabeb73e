"""Gather of parameters and weight sync together bring what a rank lacks, and no plan brings less.

What ranks hold and need is told by ``support/layout_oracle.py``. The buffers of the distributed
optimizer are laid out here, as arrays of the numbers of elements, and cut among its ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import lcm

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.layout_arrays import PADDING, Array, Case, hf_arrays, padded
from support.layout_cases import (
    GQA,
    LATENT,
    MOE,
    MOVED,
    PLAIN_LATENT,
    REDUNDANT,
    SLICED,
    TIED,
    cases,
    layouts_of,
)
from support.layout_oracle import megatron_params, vllm_params

from mindspeed_rl.handover.joint import Handover, RankHandover, handover
from mindspeed_rl.weights.planner import plan_reshard
from mindspeed_rl.weights.traffic import element_bytes_of, rank_traffic

BIAS = "router.expert_bias"


def elements(arrays: Mapping[str, Array] | list[Array]) -> set[int]:
    """The numbers of the elements in some arrays."""
    found: set[int] = set()
    for array in arrays.values() if isinstance(arrays, Mapping) else arrays:
        found.update(array.ravel().tolist())
    return found - {PADDING}


def buffers(case: Case, params: Mapping[str, Array], rank: int) -> list[tuple[Array, int, int]]:
    """The buffers of a rank: its elements, by how many ranks it is cut, and which part is its."""
    kinds: dict[tuple[str, bool], list[Array]] = {}
    for name, array in reversed([*params.items()]):
        if not name.endswith(BIAS):
            chunk = re.match(r"chunk\d+", name)
            kind = chunk[0] if chunk else "", case.ep > 1 and ".experts." in name
            kinds.setdefault(kind, []).append(padded(array.ravel(), 64))
    of_stage = case.world // case.pp
    found = []
    for (_, experts), arrays in kinds.items():
        replicated_over = case.ep * (case.etp or case.tp) if experts else case.tp
        count = of_stage // replicated_over
        flat = padded(np.concatenate(arrays), lcm(count, 128))
        found.append((flat, count, rank % of_stage // replicated_over))
    return found


class Held:
    """The elements of a rank: its shards S, its trainer's T, its engine's E."""

    def __init__(self, case: Case, hf: dict[str, Array], rank: int) -> None:
        params = megatron_params(case, hf, rank)
        self.trainer = elements(params)
        self.engine = elements(vllm_params(case, hf, rank))
        self.buffers = buffers(case, params, rank)
        parts = [np.split(flat, count)[place] for flat, count, place in self.buffers]
        biases = [array for name, array in params.items() if name.endswith(BIAS)]
        self.own = elements([*parts, *biases])
        self.received = sum(len(flat) - len(flat) // count for flat, count, _ in self.buffers)
        self.padding = sum(int((flat == PADDING).sum()) for flat, _, _ in self.buffers)


@given(cases(), st.sampled_from([2, 4]), st.sampled_from([2, 4]))
@settings(max_examples=25, deadline=None)
@example(GQA, 2, 2)
@example(TIED, 2, 2)
@example(MOE, 4, 4)
@example(LATENT, 2, 2)
@example(PLAIN_LATENT, 4, 2)
@example(SLICED, 2, 2)
@example(REDUNDANT, 2, 4)
@example(MOVED, 2, 2)
@example(replace(LATENT, dp=2, ranks_per_node=3), 2, 2)
@example(replace(GQA, tp=1, pp=2, cp=2, dp=4, kv_heads=2, engine_tp=4), 2, 2)
def test_gather_and_sync_are_at_the_floor_of_both(case: Case, train: int, engine: int) -> None:
    """For every rank, and for the ranks of a node together, where each phase is at its own."""
    source, target = layouts_of(case)
    hf = hf_arrays(case)
    biases = elements({n: a for n, a in hf.items() if n.endswith("e_score_correction_bias")})

    def size(found: set[int], item: int) -> int:
        return item * len(found - biases) + 4 * len(found & biases)

    got = handover(
        source, target, train_item=train, engine_item=engine, distributed_optimizer=True
    ).ranks
    held = [Held(case, hf, rank) for rank in range(case.world)]
    narrow = min(train, engine)
    floors = 0
    for rank, (has, told) in enumerate(zip(held, got, strict=True)):
        assert has.own <= has.trainer, rank
        lacks = (has.trainer | has.engine) - has.own
        gathered, synced = has.trainer - has.own, has.engine - has.trainer
        assert not gathered & synced and gathered | synced == lacks, rank
        assert told.gather_bytes == train * has.received, rank
        assert 0 <= told.gather_bytes - train * len(gathered) <= train * has.padding, rank
        assert told.sync_bytes == size(synced, engine), rank
        assert told.sync_floor_bytes == size(synced, narrow), rank
        assert told.later_bytes >= train * len(has.trainer - has.own - has.engine), rank
        floors += train * len(lacks & has.trainer) + size(lacks - has.trainer, narrow)
    assert sum(told.floor_bytes for told in got) == pytest.approx(floors, rel=1e-12)
    for first in range(0, case.world, case.ranks_per_node):
        node = held[first : first + case.ranks_per_node]
        own, trainer, needed = (
            set().union(*(getattr(rank, kind) for rank in node))
            for kind in ("own", "trainer", "engine")
        )
        assert len((trainer | needed) - own) == len(trainer - own) + len(needed - trainer)


def test_the_sync_is_that_of_the_plan() -> None:
    for case in (MOE, LATENT, SLICED):
        source, target = layouts_of(case)
        bytes_of = element_bytes_of(source, 2)
        found = handover(
            source, target, train_item=2, engine_item=2, distributed_optimizer=True
        ).ranks
        for rank, told in enumerate(found):
            plan = plan_reshard(source, target, rank, case.ranks_per_node)
            traffic = rank_traffic(plan, bytes_of, case.ranks_per_node)
            assert told.sync_bytes == traffic.receive_bytes, (case, rank)


def test_without_a_distributed_optimizer_nothing_is_gathered() -> None:
    source, target = layouts_of(LATENT)
    found = handover(source, target, train_item=2, engine_item=2, distributed_optimizer=False)
    assert {r.gather_bytes for r in found.ranks} == {0} == {r.later_bytes for r in found.ranks}
    assert found.saved_bytes == found.waiting_bytes == 0 and not found.pays
    assert len(list(found.verdict())) == 1


def test_a_joint_plan_pays_where_different_ranks_are_busy_or_types_are_wider_than_needed() -> None:
    def said(moved: Handover) -> str:
        return re.sub(
            "a single plan .* engine, (.*) be worthwhile: .*", r"\1", next(moved.verdict())
        )

    even = RankHandover(100, 100.0, 1000, 1000, 0)
    assert not Handover((even, even)).pays and said(Handover((even, even))) == "would not"
    one, other = replace(even, gather_bytes=1000, gather_floor_bytes=1000.0), even
    other = replace(other, gather_bytes=0, gather_floor_bytes=0.0, sync_bytes=2000)
    uneven = Handover((one, replace(other, sync_floor_bytes=2000)))
    assert uneven.waiting_bytes == 1000 and uneven.saved_bytes == 0 and uneven.pays
    assert said(uneven) == "could"
    wide = Handover((replace(even, sync_floor_bytes=500),))
    assert wide.saved_bytes == 500 and wide.waiting_bytes == 0 and wide.pays
    assert wide.as_json()["both"] == {"most_of_a_rank": 1100, "of_all_ranks": 1100}
