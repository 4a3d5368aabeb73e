"""Rounds of a reshard: everything once, within the budget, all stages busy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reshard_figures import RoundTraffic, busiest_bytes, critical_bytes, round_traffic
from support.layout_arrays import Case
from support.layout_cases import (
    GQA,
    LATENT,
    MOE,
    MOVED,
    REDUNDANT,
    cases,
    layouts_of,
)
from support.local_reshard import ITEM_BYTES, schedule_of, smallest_round

from mindspeed_rl.weight_layouts.base import ShardLayout
from mindspeed_rl.weight_layouts.hf_file import HfFileLayout
from mindspeed_rl.weights.executor import ROUNDS_IN_FLIGHT
from mindspeed_rl.weights.planner import plan_reshard
from mindspeed_rl.weights.schedule import Schedule
from mindspeed_rl.weights.traffic import element_bytes_of, rank_traffic

ROOM = 3.0  # times the smallest budget


def staged_bytes(schedule: Schedule, case: Case, relay: bool) -> np.ndarray:
    """[rounds, ranks] bytes that each rank sends plus receives in the busier hop."""
    source, target = layouts_of(case)
    table = np.zeros((2, schedule.num_rounds, case.world), int)
    for rank in range(case.world):
        plan = plan_reshard(source, target, rank, case.ranks_per_node, relay=relay)
        for transfer in (*plan.sends, *plan.receives):
            slots = schedule.slots_of(source, transfer.hf_name)
            for slot, part in zip(slots, transfer.parts(slots[0].parts), strict=True):
                if part:
                    number = slot.round_of(transfer.src_rank, transfer.dst_rank)
                    table[transfer.hop - 1, number, rank] += ITEM_BYTES * part.num_elements
    return table.max(axis=0)


@given(cases(), st.booleans())
@settings(max_examples=25, deadline=None)
@example(GQA, False)
@example(MOE, True)
@example(LATENT, False)
@example(REDUNDANT, False)
@example(MOVED, False)
@example(replace(GQA, tp=1, pp=1, dp=8, kv_heads=4, engine_tp=8, heads_per_group=2), False)
def test_no_rank_stages_more_than_the_budget(case: Case, relay: bool) -> None:
    source, target = layouts_of(case)
    for room in (1.0, ROOM):
        bucket_bytes = int(room * smallest_round(case, source, target, relay))
        schedule = schedule_of(case, source, target, bucket_bytes, relay)
        assert staged_bytes(schedule, case, relay).max() <= bucket_bytes


def test_a_large_bucket_makes_one_round() -> None:
    assert schedule_of(GQA, *layouts_of(GQA), 10**9).num_rounds == 1


def assert_busy(
    case: Case, source: ShardLayout, target: ShardLayout, schedule: Schedule
) -> list[RoundTraffic]:
    """The busiest rank of every round, summed, is close to the busiest rank of the whole."""
    bytes_of = element_bytes_of(source, ITEM_BYTES)
    ranks = range(case.world)
    plans = [plan_reshard(source, target, rank, case.ranks_per_node) for rank in ranks]
    by_round = [round_traffic(plan, schedule, source, bytes_of) for plan in plans]
    totals = (rank_traffic(plan, bytes_of, case.ranks_per_node) for plan in plans)
    assert critical_bytes(by_round) <= 1.25 * max(map(busiest_bytes, totals))
    return by_round


def test_all_stages_send_in_all_rounds() -> None:
    case = replace(
        GQA, num_layers=14, pp=4, tp=1, dp=2, engine_tp=2, layer_list=(3, 4, 4, 3), hidden=8
    )
    source, target = layouts_of(case)
    schedule = schedule_of(case, source, target, 12_000)
    assert schedule.num_rounds > 4
    traffic = assert_busy(case, source, target, schedule)
    sent = np.array([rank.send_bytes for rank in traffic])  # [ranks, rounds]
    assert (sent.reshape(4, 2, -1).sum(axis=1) > 0).all()


def test_experts_of_all_ranks_stream_side_by_side() -> None:
    """Whole tensors one after another would let one rank send while the others wait."""
    case = replace(
        MOE, tp=1, pp=1, vpp=1, cp=1, dp=4, ep=4, etp=1, experts=16, expert_ffn=64,
        num_layers=4, layer_list=(), noop=(), moe_layers=(True,) * 4, hidden=16, vocab=8,
    )  # fmt: skip
    source, _ = layouts_of(case)
    target = HfFileLayout.of(source, range(case.world))
    schedule = schedule_of(case, source, target, 80_000)
    assert schedule.num_rounds > 10
    assert_busy(case, source, target, schedule)


@pytest.mark.parametrize("bucket_bytes", [0, -1])
def test_a_bucket_without_room_is_refused(bucket_bytes: int) -> None:
    with pytest.raises(ValueError, match=r"--reshard-bucket-mb .* must be positive"):
        schedule_of(GQA, *layouts_of(GQA), bucket_bytes)


def test_a_bucket_too_small_names_one_that_fits() -> None:
    with pytest.raises(ValueError, match=r"--reshard-bucket-mb gives 8 bytes") as error:
        schedule_of(GQA, *layouts_of(GQA), 8)
    megabytes = float(str(error.value).rpartition(" ")[2])
    schedule_of(GQA, *layouts_of(GQA), int(megabytes * 2**20 / ROUNDS_IN_FLIGHT))
