"""Among equally balanced placements, the one that moves the fewest bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import permutations
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
from mindspeed_rl.samples.balance import MicroBatchPlan
from mindspeed_rl.samples.batching import BatchRules
from mindspeed_rl.samples.locality import best_assignment, bytes_moved, minimize_moves
from mindspeed_rl.samples.rollout_info import RolloutInfo, SampleKey
from mindspeed_rl.samples.store import SampleStore


def placed(lengths: list[int], dp: int, max_tokens: int = 12) -> MicroBatchPlan:
    return BatchRules(
        dp=dp, dp_rank=0, micro_batch_size=2, max_tokens=max_tokens, row_multiple=1
    ).plan(lengths)


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
    assert near.padded_length == plan.padded_length
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
        return SimpleNamespace(keep=lambda: None), {}

    monkeypatch.setattr(SampleStore, "_move", moved)
    for rank in range(4):
        own = replace(
            store,
            rank=rank,
            parallel=layout,
            engine=EngineLayout(4, 1),
            rules=replace(store.rules, dp=4, dp_rank=rank),
            samples_per_update=8,
            one_node=False,
        )
        placed = own.place(samples)
        for number, update in enumerate(placed.plans):
            for dp, rows in enumerate(update.assignment):
                assert [engines[8 * number + i] for row in rows for i in row] == [dp, dp]
    assert hops == [()] * 4
    assert torch.tensor(engines).bincount().tolist() == [4] * 4
