"""Turns of pairs of ranks: few messages, the same bytes in the same places, the same staging."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reshard_figures import critical_bytes, round_traffic
from support.layout_arrays import Case
from support.layout_cases import GQA, MOE, MOVED, REDUNDANT, SLICED, TIED, cases, layouts_of
from support.local_reshard import (
    ITEM_BYTES,
    assert_arrived,
    move,
    schedule_of,
    smallest_bucket,
    smallest_round,
)
from support.published import Reshard

from mindspeed_rl.weights import turns
from mindspeed_rl.weights.executor import split_rounds
from mindspeed_rl.weights.planner import plan_reshard
from mindspeed_rl.weights.schedule import plan_schedule
from mindspeed_rl.weights.traffic import element_bytes_of
from mindspeed_rl.weights.turns import ALL_AT_ONCE, RankTurns, TurnChoice, digit_sum, turn_of

TURNS = st.builds(RankTurns, st.integers(2, 5), st.integers(1, 4), st.booleans())


@contextmanager
def forced(chosen: RankTurns) -> Iterator[None]:
    """All tensors take these turns."""
    with mock.patch.object(turns, "choose_turns", lambda *_: TurnChoice(chosen, 0.0)):
        yield


@given(cases(), TURNS, st.booleans())
@settings(max_examples=6, deadline=None)
@example(SLICED, RankTurns(4), False)
@example(replace(SLICED, transposed=False), RankTurns(3, 2, by_stage=True), True)
@example(MOE, RankTurns(8), False)
@example(TIED, RankTurns(3, 1, by_stage=True), False)
@example(REDUNDANT, RankTurns(2), False)
@example(MOVED, RankTurns(5, 2), True)
def test_every_element_arrives_in_its_turn(
    case: Case, chosen: RankTurns, many_messages: bool
) -> None:
    """All ranks' plans, run by the executor: bit-equal to slicing by hand, within the bucket."""
    source, target = layouts_of(case)
    with forced(chosen):
        bucket_bytes = smallest_bucket(case, source, target, relay=False)
        moved = move(case, source, target, bucket_bytes, many_messages=many_messages)
    assert_arrived(case, moved)


@given(cases(), TURNS)
@settings(max_examples=6, deadline=None)
@example(SLICED, RankTurns(4))
@example(TIED, RankTurns(2, 1, by_stage=True))
@example(MOE, RankTurns(3, 2, by_stage=True))
def test_a_pair_of_ranks_exchanges_once_in_a_group_of_rounds(case: Case, chosen: RankTurns) -> None:
    """In the round of its turn; nobody stages more than the budget; both ends list the same."""
    source, target = layouts_of(case)
    with forced(chosen):
        size = smallest_round(case, source, target, relay=False)
        schedule = schedule_of(case, source, target, size)
    assert schedule.num_rounds % chosen.count == 0
    ranks = range(case.world)
    plans = [plan_reshard(source, target, rank, case.ranks_per_node) for rank in ranks]
    rounds = [split_rounds(plan, schedule, source, 1) for plan in plans]
    for number in range(schedule.num_rounds):
        for rank, other in ((r, o) for r in ranks for o in ranks):
            sent = rounds[rank][number].hops[0].sends.get(other, ())
            received = rounds[other][number].hops[0].receives.get(rank, ())
            assert [(t.hf_name, t.hf_box, t.num_tensors) for t in sent] == [
                (t.hf_name, t.hf_box, t.num_tensors) for t in received
            ]
        staged = (of_rank[number].hops[0].staging_bytes(ITEM_BYTES) for of_rank in rounds)
        assert max(staged) <= size + 16  # what is received begins at a multiple of 16 bytes
    if not chosen.by_stage:
        for rank in ranks:
            met = Counter(
                (number // chosen.count, peer)
                for number, part in enumerate(rounds[rank])
                for peer in part.hops[0].receives
            )
            assert set(met.values()) <= {1}


@given(st.integers(2, 9), st.integers(0, 400))
def test_digits_are_summed(base: int, number: int) -> None:
    digits = np.base_repr(number, base)
    assert digit_sum(np.array([number]), base)[0] == sum(int(d) for d in digits)


@pytest.mark.parametrize(
    "chosen", [RankTurns(4), RankTurns(3, 2, by_stage=True), ALL_AT_ONCE], ids=str
)
def test_one_pair_has_the_turn_of_arrays(chosen: RankTurns) -> None:
    stage, src, dst = np.arange(-1, 26), np.arange(27) % 7, np.arange(27) * 5 % 23
    several = chosen.of(stage, src, dst).tolist()
    pairs = zip(stage.tolist(), src.tolist(), dst.tolist(), strict=True)
    assert several == [turn_of(chosen, *pair) for pair in pairs]
    assert 0 <= min(several) <= max(several) < chosen.count


# --- which turns -------------------------------------------------------------------------------

QWEN = Reshard("qwen3-30b-a3b", 16, "tp=1,pp=2,ep=8,etp=1", "tp=2")
SMALL_DEEPSEEK = Reshard(
    "deepseek-v3", 64, "tp=4,pp=4,ep=4,moe_tp_extend_ep=1,num_layer_list=3-3-3-3",
    "tp=2,dp=32,ep=64", changes={"n_routed_experts": 64},
)  # fmt: skip


@pytest.mark.parametrize("case", [QWEN, SMALL_DEEPSEEK], ids=str)
def test_turns_make_few_messages_of_the_same_bytes(case: Reshard) -> None:
    """A fraction of the messages, and rounds as busy and about as many as without turns."""
    source, target = case.layouts()
    bytes_of = element_bytes_of(source, 2)
    ranks = range(0, case.world, 3)
    plans = [plan_reshard(source, target, rank, case.ranks_per_node) for rank in ranks]
    found = {}
    for most in (100, 10**9):
        with mock.patch.object(turns, "MOST_MESSAGES", most):
            schedule = plan_schedule(
                source, target, bucket_bytes=1 << 27, item_bytes=2, ranks_per_node=16
            )
        found[most] = schedule, [round_traffic(p, schedule, source, bytes_of) for p in plans]
    (few, in_turns), (usual, at_once) = found.values()
    assert all(slot.turns is ALL_AT_ONCE for slots in usual.slots.values() for slot in slots)
    for a, b in zip(in_turns, at_once, strict=True):
        assert sum(a.receive_bytes) == sum(b.receive_bytes)
        assert sum(a.send_bytes) == sum(b.send_bytes)
        assert a.num_messages < 0.6 * b.num_messages
        assert a.peak_bytes <= 1 << 27
    assert few.num_rounds <= 1.25 * usual.num_rounds
    assert critical_bytes(in_turns) <= 1.1 * critical_bytes(at_once)


@pytest.mark.parametrize("case", [GQA, MOE], ids=["dense", "experts"])
def test_few_messages_need_no_turns(case: Case) -> None:
    source, target = layouts_of(case)
    schedule = schedule_of(case, source, target, 4 * smallest_round(case, source, target, False))
    assert all(slot.turns is ALL_AT_ONCE for slots in schedule.slots.values() for slot in slots)
