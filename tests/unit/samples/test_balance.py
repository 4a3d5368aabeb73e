"""Rows that are full and ranks with equal work, from lengths alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from math import factorial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl.samples.balance import SequenceCost, fill_rows, partition, rows_for_ranks
from mindspeed_rl.samples.batching import BatchRules

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
    plan = BatchRules(dp=dp, dp_rank=0, micro_batch_size=1, max_tokens=most, row_multiple=1).plan(
        lengths
    )
    tokens = [sum(lengths[i] for row in rank for i in row) for rank in plan.assignment]
    assert max(tokens) <= 1.03 * sum(tokens) / dp
    num_rows = dp * plan.num_micro_batches
    assert sum(tokens) >= 0.97 * num_rows * plan.padded_length


def test_work_that_grows_with_the_square_is_what_is_even() -> None:
    lengths = heavy_tail(7000, 32768, 1024)
    cost = SequenceCost(1.0, 1 / 4096)
    plan = BatchRules(
        dp=8, dp_rank=0, micro_batch_size=1, max_tokens=32768, row_multiple=1, cost=cost
    ).plan(lengths)
    work = [sum(cost.of(lengths[i]) for row in rank for i in row) for rank in plan.assignment]
    assert max(work) <= 1.03 * sum(work) / 8
    assert cost.of(4096) == 2 * 4096


def test_micro_batches_of_a_number_of_samples_have_equal_work_too() -> None:
    lengths = heavy_tail(1500, 3072, 512)
    plan = BatchRules(dp=4, dp_rank=0, micro_batch_size=16, row_multiple=8).plan(lengths)
    assert plan.num_micro_batches == 8
    assert all(len(row) == 16 for rank in plan.assignment for row in rank)
    tokens = [sum(lengths[i] for row in rank for i in row) for rank in plan.assignment]
    assert max(tokens) <= 1.001 * sum(tokens) / 4
    assert plan.padded_length <= 1.01 * sum(lengths) / 32
