"""The simulator of idle decode slots: what its rows must say of each other."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from support.architecture import ROOT

sys.path.insert(0, str(ROOT / "tools"))

from bench.tail import DrawnRollouts, Way, floor_time, lengths_of, measure, rollout_time, table

from mindspeed_rl.samples.lengths import LengthHistory

CASE = DrawnRollouts(
    dataset=96, prompts=16, group=4, engines=4, slots=4, mean=300, limit=900, interval=64,
    cap_floor=50,
)  # fmt: skip


def test_a_rollout_by_hand() -> None:
    """Two engines of one slot: 5 + 1 steps beside 2 + 3, whatever is expected."""
    case = replace(CASE, engines=2, slots=1)
    way, nothing = Way("", dealt=False), LengthHistory()
    assert rollout_time(case, way, [0, 0, 1, 1], [5, 1, 2, 3], nothing) == 6
    assert floor_time(case, [5, 1, 2, 3]) == 6 and floor_time(case, [9, 1, 1, 1]) == 9


def test_an_engine_that_starts_the_longest_first_does_not_end_with_it() -> None:
    """One engine of two slots: 2 + 2 + 8 steps in order, 8 beside 2 + 2 + 2 + 2 sorted."""
    case, history = replace(CASE, engines=1, slots=2), LengthHistory()
    history.observe({0: [2], 1: [2], 2: [2], 3: [2], 4: [8]})
    prompts, lengths = [0, 1, 2, 3, 4], [2, 2, 2, 2, 8]
    times = [
        rollout_time(case, Way("", sorted=longest), prompts, lengths, history)
        for longest in (False, True)
    ]
    assert times == [12, 8]
    tight = replace(case, room=9)  # tokens: beside the long one there is never room for another
    assert rollout_time(tight, Way(""), prompts, lengths, history) == 8 + 2 + 2


def test_every_way_generates_the_same_tokens_and_none_beats_its_floor() -> None:
    rows = table(CASE, drafts=0.6, cap=1.2)
    last = rows.pop("floor of the best order")
    for name, row in rows.items():
        assert row["floor"] <= row["idle"] < 1, name
        assert (row["cut_tokens"] > 0) == ("caps" in name)
    sorted_, dealt, drawn = (
        rows[n]["steps"] for n in ("dealt, longest first", "dealt, in order", "as drawn")
    )
    assert sorted_ < dealt < drawn and rows["ordered"]["steps"] < drawn
    assert rows["ordered and moved"]["idle"] <= rows["ordered"]["idle"] + 0.01
    assert last["steps"] < min(row["steps"] for n, row in rows.items() if "drafts" not in n)
    whole = sum(sum(lengths_of(CASE, 1, p)) for p in range(CASE.dataset))
    found = measure(CASE, Way("", ordered=True))
    assert found.tokens == whole and sorted(found.order) == list(range(CASE.dataset))


def test_drafts_take_fewer_steps_for_the_same_tokens() -> None:
    """While an engine reads its weights it computes all tokens of its slots, so idle is equal."""
    plain, drafted = (measure(CASE, Way("", steps_per_token=s)) for s in (1.0, 0.5))
    assert drafted.time == pytest.approx(plain.time / 2) and drafted.tokens == plain.tokens
    wide = replace(CASE, ridge=4)
    assert measure(wide, Way("", steps_per_token=0.5)).time > 0.5 * measure(wide, Way("")).time


def test_with_equal_lengths_there_is_nothing_to_order() -> None:
    rows = table(replace(CASE, sigma=0.0), drafts=0.0, cap=0.0)
    assert len({row["steps"] for row in rows.values()}) == 1
