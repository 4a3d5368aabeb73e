"""Places of experts by load: no busier rank than needed, and nothing moves for nothing."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from support.published import Reshard

from mindspeed_rl.expert_placement.balance import balanced, load_of_positions, plan_balance
from mindspeed_rl.expert_placement.near_trainer import TrainerExperts

NOWHERE = np.zeros((8, 4), np.int64)


def best_busiest(load: np.ndarray, positions: int) -> int:
    """The least load of the busiest position over all placements."""
    slots = permutations(range(len(load)))
    return min(int(load_of_positions(s, load, positions).max()) for s in slots)


@pytest.mark.parametrize("seed", range(6))
def test_the_busiest_rank_is_near_the_least_possible(seed: int) -> None:
    """Eight experts with uneven loads on four ranks, against all placements."""
    load = (np.random.default_rng(seed).pareto(1.5, 8) * 100 + 1).astype(np.int64)
    slots = balanced(tuple(range(8)), load, NOWHERE)
    assert sorted(slots) == list(range(8)), "every expert once"
    found = int(load_of_positions(slots, load, 4).max())
    assert best_busiest(load, 4) <= found <= 1.1 * best_busiest(load, 4)
    assert found <= load_of_positions(tuple(range(8)), load, 4).max()


def test_among_equal_exchanges_that_near_training_is_taken() -> None:
    """Expert 0 or 1 may leave the first rank for either 2 or 3; training holds 3 at the first."""
    load = np.array([10, 10, 2, 2], np.int64)
    held = np.array([[0, 0], [0, 0], [0, 0], [1, 0]], np.int64)
    assert balanced((0, 1, 2, 3), load, held) == (1, 3, 0, 2)


def test_even_load_moves_nothing() -> None:
    load = np.full(8, 50, np.int64)
    assert balanced((3, 1, 7, 5, 0, 2, 4, 6), load, NOWHERE) == (1, 3, 5, 7, 0, 2, 4, 6)


CASE = Reshard(
    "qwen3-30b-a3b", 4, "pp=2,ep=2,etp=1,num_layer_list=1-1", "dp=4,ep=4", 4,
    {"num_experts": 8, "num_experts_per_tok": 2},
)  # fmt: skip


def test_a_placement_is_taken_where_the_layers_together_gain() -> None:
    source, target = CASE.layouts()
    trainer = TrainerExperts(source, target.engine)
    slots = {layer: target.experts_at(layer) for layer in target.spec.expert_layers}
    even = np.full((2, 8), 100, np.int64)
    assert plan_balance(slots, slots, even, trainer).slots is None
    slightly = even.copy()
    slightly[0, :2] += 10
    plan = plan_balance(slots, slots, slightly, trainer)
    assert plan.slots is None, "the sum over both layers would fall by less than 5 %"
    assert plan.imbalance > plan.reachable
    uneven = even.copy()
    uneven[1, :2] += 100
    plan = plan_balance(slots, slots, uneven, trainer)
    # 200 in the first layer and 400 of 250 in the second, of 450 in the mean
    assert plan.imbalance == pytest.approx(600 / 450)
    assert plan.reachable == pytest.approx(500 / 450)
    assert plan.slots is not None and plan.slots[0] == slots[0] and plan.slots[1] != slots[1]
    again = plan_balance(plan.slots, slots, uneven, trainer)
    assert again.slots is None and again.imbalance == pytest.approx(500 / 450)


def test_a_rollout_without_tokens_moves_nothing() -> None:
    source, target = CASE.layouts()
    slots = {layer: target.experts_at(layer) for layer in target.spec.expert_layers}
    trainer = TrainerExperts(source, target.engine)
    assert plan_balance(slots, slots, np.zeros((2, 8), np.int64), trainer).slots is None
