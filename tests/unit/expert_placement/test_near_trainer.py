"""Experts of an engine go where training holds them, as far as that is possible."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from reshard_figures import rank_floor
from support.published import Reshard

from mindspeed_rl.expert_placement.near_trainer import (
    TrainerExperts,
    kept,
    lacking_elements,
    near_trainer,
    placed_near_trainer,
)
from mindspeed_rl.weight_layouts.rollout import Slots
from mindspeed_rl.weights.traffic import element_bytes_of

BF16 = 2
QWEN = "qwen3-30b-a3b"
RESHARDS = (
    Reshard(QWEN, 16, "tp=4,pp=2,ep=8,etp=1,num_layer_list=2-1", "tp=2,dp=8,ep=16"),
    # experts cut in training
    Reshard(QWEN, 16, "tp=2,pp=2,ep=4,etp=2,num_layer_list=1-1", "tp=4,dp=4,ep=16"),
    # engines smaller than the ranks that share the experts in training
    Reshard(QWEN, 32, "tp=2,pp=2,ep=16,etp=1,num_layer_list=1-1", "tp=2,dp=2,ep=4"),
    Reshard(
        "deepseek-v3", 32, "tp=2,pp=4,ep=4,moe_tp_extend_ep=1,num_layer_list=1-1-2-1",
        "tp=2,dp=8,ep=16", 8,
    ),
)  # fmt: skip


def most_kept(held: tuple[tuple[int, ...], ...]) -> int:
    """The optimum, by scipy's assignment of experts to single slots."""
    from scipy.optimize import linear_sum_assignment

    gains = np.repeat(np.array(held), len(held) // len(held[0]), axis=1)
    rows, columns = linear_sum_assignment(gains, maximize=True)
    return int(gains[rows, columns].sum())


@pytest.mark.parametrize("case", RESHARDS, ids=str)
def test_as_many_experts_as_possible_stay(case: Reshard) -> None:
    source, target = case.layouts()
    trainer = TrainerExperts(source, target.engine)
    placed = placed_near_trainer(source, target)
    layers = target.spec.expert_layers
    assert layers and {layer for layer, _ in placed.layer_experts} <= set(layers)
    for layer in layers:
        held = trainer.held(layer)
        slots = placed.experts_at(layer)
        assert sorted(slots) == list(range(target.spec.num_experts)), "each expert once"
        assert kept(slots, held) == most_kept(held) >= kept(target.experts_at(layer), held)


@pytest.mark.parametrize("case", RESHARDS, ids=str)
def test_lacking_elements_are_what_the_floor_says(case: Reshard) -> None:
    """The floors are counted from rectangles, which know nothing of placements."""
    source, target = case.layouts()
    placed = placed_near_trainer(source, target)
    bytes_of, ranks = element_bytes_of(source, BF16), range(case.world)
    before, after = (
        sum(rank_floor(source, layout, rank, bytes_of) for rank in ranks) / case.world
        for layout in (target, placed)
    )
    saved = lacking_elements(source, target) - lacking_elements(source, placed)
    assert saved > 0
    assert before - after == pytest.approx(BF16 * saved)


def test_what_qwen_saves_on_one_node() -> None:
    """48 layers on 16 ranks: 4.42 GiB per rank become 2.95, by the placement alone."""
    source, target = replace(RESHARDS[0], train="tp=4,pp=2,ep=8,etp=1").layouts()
    bytes_of = element_bytes_of(source, BF16)
    for layout, gib in ((target, 4.42), (placed_near_trainer(source, target), 2.95)):
        floors = [rank_floor(source, layout, rank, bytes_of) for rank in range(16)]
        assert sum(floors) / 16 / 2**30 == pytest.approx(gib, abs=0.01)


def test_a_placement_by_hand() -> None:
    """Experts 0 and 3 are trained at position 1, twice; 1 at both; 2 nowhere in this engine."""
    held = ((0, 2), (1, 1), (0, 0), (0, 2))
    assert near_trainer(held) == (1, 2, 0, 3)
    assert kept((1, 2, 0, 3), held) == 5 and kept((0, 1, 2, 3), held) == 3


def test_nothing_moves_where_nothing_is_gained() -> None:
    """Training with the expert parallelism of the engine on the same ranks."""
    case = Reshard(QWEN, 8, "ep=8,etp=1,num_layer_list=2", "tp=2,dp=4,ep=8")
    source, target = case.layouts()
    assert placed_near_trainer(source, target) == target
    assert lacking_elements(source, target) == 0


def test_a_layer_needs_as_many_slots_as_the_others() -> None:
    _, target = RESHARDS[0].layouts()
    short: Slots = tuple(range(127))
    with pytest.raises(AssertionError, match="layer 1"):
        replace(target, layer_experts=((1, short),))
