"""Rows that are full, ranks with equal work, and then the fewest bytes that move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, permutations, product
from math import factorial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rl_run import make_run
from support.sample_world import layout_of

from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.metrics.metric_set import Max, MetricSet
from mindspeed_rl.packing.bins import fill_rows, partition, rows_for_ranks
from mindspeed_rl.packing.cost import SequenceCost
from mindspeed_rl.packing.micro_batches import MicroBatchPlan, PackingRules
from mindspeed_rl.samples.placement import BatchRules, best_assignment, bytes_moved, minimize_moves
from mindspeed_rl.samples.rollout_info import RolloutInfo, SampleKey
from mindspeed_rl.samples.store import SampleStore

COSTS = st.lists(st.integers(0, 1000), max_size=40)


@given(COSTS, st.integers(1, 9))
@settings(deadline=None)
def test_a_partition_has_every_item_once_in_parts_of_equal_number(
    costs: list[int], num_parts: int
) -> None:
    parts = partition(costs, num_parts)
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    numbers = [len(part) for part in parts]
    assert len(numbers) == num_parts and max(numbers) - min(numbers) <= 1
    assert numbers == sorted(numbers, reverse=True)


@given(st.lists(st.integers(0, 50), min_size=2, max_size=8).filter(lambda c: len(c) % 2 == 0))
@settings(deadline=None)
def test_two_parts_are_close_to_the_best_of_equal_number(costs: list[int]) -> None:
    """Against every split into halves, within the bound for k items per part.

    It is 2 - sum(i!, i < k) / k! (Michiels et al. 2012).
    """
    size = len(costs) // 2
    bound = 2 - sum(map(factorial, range(size))) / factorial(size)
    heaviest = max(sum(costs[i] for i in part) for part in partition(costs, 2))
    halves = combinations(range(len(costs)), len(costs) // 2)
    best = min(max(sum(costs[i] for i in h), sum(costs) - sum(costs[i] for i in h)) for h in halves)
    assert best <= heaviest <= bound * best + 1e-9


@given(st.lists(st.integers(1, 20), max_size=7), st.integers(20, 30))
@settings(deadline=None)
def test_rows_hold_everything_once_and_are_nearly_the_fewest(
    lengths: list[int], capacity: int
) -> None:
    rows = fill_rows(lengths, capacity)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(row and sum(lengths[i] for i in row) <= capacity for row in rows)
    assert len(rows) <= 11 / 9 * fewest(lengths, capacity) + 1


def fewest(lengths: Sequence[int], capacity: int) -> int:
    """By trying every assignment."""
    for count in range(len(lengths) + 1):
        for places in product(range(count), repeat=len(lengths)):
            used = [0] * count
            for place, length in zip(places, lengths, strict=True):
                used[place] += length
            if max(used, default=0) <= capacity:
                return count
    raise AssertionError("one row each is always enough")


def test_rows_that_must_be_there_anyway_make_all_of_them_shorter() -> None:
    lengths = [6, 6, 6, 1, 1, 1]
    assert fill_rows(lengths, 20) == [[0, 1, 2, 3, 4], [5]]
    rows = rows_for_ranks(lengths, 20, 3)
    assert [sum(lengths[i] for i in row) for row in rows] == [7, 7, 7]
    four = rows_for_ranks(lengths, 21, 4)
    assert len(four) == 4 and max(sum(lengths[i] for i in row) for row in four) == 6
    assert rows_for_ranks([], 10, 2) == [[], []]


def heavy_tail(mean: float, most: int, count: int = 8192) -> list[int]:
    """Lengths of a log-normal cut at ``most``, scaled until their mean is within 2 %."""
    rng = np.random.default_rng(0)
    drawn = rng.lognormal(0.0, 0.8, count)
    scale = mean
    for _ in range(50):
        lengths = np.clip(drawn * scale, 32, most)
        scale *= mean / lengths.mean()
    assert abs(lengths.mean() / mean - 1) < 0.02 and lengths.max() == most
    return [int(n) for n in lengths]


@pytest.mark.parametrize("dp", [8, 32])
@pytest.mark.parametrize(("mean", "most"), [(1500, 3072), (7000, 32768)])
def test_a_large_step_is_even_and_full(mean: int, most: int, dp: int) -> None:
    """8192 samples, rows as long as the longest: the limits of the issue."""
    lengths = heavy_tail(mean, most)
    plan = PackingRules(dp=dp, micro_batch_size=1, max_tokens=most, row_multiple=1).assign(lengths)
    tokens = [sum(lengths[i] for row in rank for i in row) for rank in plan.assignment]
    assert max(tokens) <= 1.03 * sum(tokens) / dp
    longest = max(map(max, plan.row_lengths))
    assert sum(tokens) >= 0.97 * dp * plan.num_micro_batches * longest, "rows are full"
    empty = sum(not row for rank in plan.assignment for row in rank)
    assert plan.num_tokens == sum(tokens) + empty, "and nothing else travels"


def test_work_that_grows_with_the_square_is_what_is_even() -> None:
    lengths = heavy_tail(7000, 32768, 1024)
    cost = SequenceCost(1.0, 1 / 4096)
    plan = PackingRules(
        dp=8, micro_batch_size=1, max_tokens=32768, row_multiple=1, cost=cost
    ).assign(lengths)
    work = [sum(cost.of(lengths[i]) for row in rank for i in row) for rank in plan.assignment]
    assert max(work) <= 1.03 * sum(work) / 8
    assert cost.of(4096) == 2 * 4096


def test_micro_batches_of_a_number_of_samples_have_equal_work_too() -> None:
    lengths = heavy_tail(1500, 3072, 512)
    plan = PackingRules(dp=4, micro_batch_size=16, row_multiple=8).assign(lengths)
    assert plan.num_micro_batches == 8
    assert all(len(row) == 16 for rank in plan.assignment for row in rank)
    tokens = [sum(lengths[i] for row in rank for i in row) for rank in plan.assignment]
    assert max(tokens) <= 1.001 * sum(tokens) / 4
    assert max(map(max, plan.row_lengths)) <= 1.01 * sum(lengths) / 32


def placed(lengths: list[int], dp: int, max_tokens: int = 12) -> MicroBatchPlan:
    return PackingRules(dp=dp, micro_batch_size=2, max_tokens=max_tokens, row_multiple=1).assign(
        lengths
    )


def balance_of(plan: MicroBatchPlan, lengths: list[int]) -> Counter[Any]:
    """The ranks of a plan, each by the lengths in its rows, whichever rank it is."""
    return Counter(
        tuple(tuple(sorted(lengths[i] for i in row)) for row in rows) for rows in plan.assignment
    )


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], int, np.ndarray]:
    """Lengths, data-parallel size, and what moves: samples on one rank or on several."""
    dp = draw(st.integers(1, 5))
    rows = draw(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4)), max_size=20))
    lengths = [length for length, _ in rows]
    moved = np.array([[most] * dp for _, most in rows], np.int64).reshape(-1, dp)
    for i in range(len(lengths)):
        for held in draw(st.sets(st.integers(0, dp - 1), max_size=2)):
            moved[i, held] = draw(st.integers(0, int(moved[i, held])))
    return lengths, dp, moved


@given(steps(), st.sampled_from([0, 12]))
@settings(deadline=None, max_examples=200)
def test_balance_is_the_same_and_no_more_bytes_move(
    step: tuple[list[int], int, np.ndarray], max_tokens: int
) -> None:
    lengths, dp, moved = step
    plan = placed(lengths, dp, max_tokens)
    near = minimize_moves(plan, lengths, moved)
    assert sorted(i for rows in near.assignment for row in rows for i in row) == list(
        range(len(lengths))
    )
    assert balance_of(near, lengths) == balance_of(plan, lengths)
    for rows, sizes in zip(near.assignment, near.row_lengths, strict=True):
        assert sizes == tuple(max(1, sum(lengths[i] for i in row)) for row in rows)
    assert all(tuple(sorted(row)) == row for rows in near.assignment for row in rows)
    assert bytes_moved(near.assignment, moved) <= bytes_moved(plan.assignment, moved)
    assert minimize_moves(plan, lengths, moved) == near, "every rank finds the same"


@given(st.lists(st.tuples(st.integers(1, 2), st.integers(0, 2)), min_size=1, max_size=6))
@settings(deadline=None, max_examples=60)
def test_nothing_that_the_two_changes_reach_moves_less(rows: list[tuple[int, int]]) -> None:
    """Against every order of ranks and of equal samples, where each is on one rank."""
    lengths, dp = [n for n, _ in rows], 3
    moved = np.array([[n * (rank != held) for rank in range(dp)] for n, held in rows], np.int64)
    plan = placed(lengths, dp, max_tokens=4)
    numbers = range(len(lengths))
    equals = [o for o in permutations(numbers) if all(lengths[o[i]] == lengths[i] for i in numbers)]
    least = min(
        sum(int(moved[order[i], at[rank]]) for rank, mine in enumerate(plan.assignment)
            for row in mine for i in row)
        for at in permutations(range(dp))
        for order in equals
    )  # fmt: skip
    assert bytes_moved(minimize_moves(plan, lengths, moved).assignment, moved) == least


@given(st.integers(1, 12), st.integers(0, 2**32 - 1), st.sampled_from([2, 10, 10**12]))
@settings(deadline=None, max_examples=100)
def test_the_best_assignment_is_that_of_scipy(size: int, seed: int, most: int) -> None:
    optimize = pytest.importorskip("scipy.optimize", reason="the section dev of versions.cfg")
    gain = np.random.default_rng(seed).integers(0, most, (size, size))
    rows, columns = optimize.linear_sum_assignment(gain, maximize=True)
    found = best_assignment(gain)
    assert sorted(found) == list(range(size))
    assert gain[found, range(size)].sum() == gain[rows, columns].sum()


def test_a_step_prefers_the_ranks_that_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`place` of four data-parallel ranks, two optimizer steps: no hop is left."""
    store = make_run(tmp_path).parts.samples
    layout = layout_of(4)
    engines = (3, 1, 0, 2, 2, 0, 1, 3, 0, 0, 1, 1, 2, 2, 3, 3)
    samples = [
        RolloutInfo(i, 3 * (i % 4), 5, 5, True, 0, engine, 0.0, key=SampleKey(1, i))
        for i, engine in enumerate(engines)
    ]
    hops: list[Any] = []

    def moved(self: object, samples: object, found: Any, *_: object) -> Any:
        hops.append(found)
        return SimpleNamespace(keep=lambda: None), MetricSet()

    monkeypatch.setattr(SampleStore, "_move", moved)
    for rank in range(4):
        own = replace(
            store,
            rank=rank,
            parallel=layout,
            engine=EngineLayout(4, 1),
            rules=BatchRules(replace(store.rules.packing, dp=4), rank),
            samples_per_update=8,
            one_node=False,
        )
        placed = own.place(samples)
        assert placed.metrics["packing/real_share"] == Max(1.0), "rows have their own lengths"
        for number, update in enumerate(placed.plans):
            for dp, rows in enumerate(update.assignment):
                assert [engines[8 * number + i] for row in rows for i in row] == [dp, dp]
    assert hops == [()] * 4
    assert torch.tensor(engines).bincount().tolist() == [4] * 4
