"""Placements of experts that even out what the ranks of an engine compute. Pure.

A layer ends with its busiest rank. Experts change places in pairs, so that every rank keeps as many
as it has memory for. No expert has a second copy, so no rank can be less busy than the busiest
expert makes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mindspeed_rl.expert_placement.near_trainer import TrainerExperts, slots_at
from mindspeed_rl.weight_layouts.rollout import Slots

TokenCounts = NDArray[np.int64]
# Least share of the time of the busiest ranks that another placement must save.
LEAST_GAIN = 0.05
# Least share of a rank's mean load by which two experts that change places must help.
_LEAST_SWAP = 0.005


def load_of_positions(slots: Slots, load: TokenCounts, num_positions: int) -> TokenCounts:
    """Return the load of every position, given that of the experts of a layer."""
    sums: TokenCounts = load[np.array(slots)].reshape(num_positions, -1).sum(1)
    return sums


def balanced(slots: Slots, load: TokenCounts, held: NDArray[np.int64]) -> Slots:
    """Improve a placement of a layer until no two experts gain by changing places.

    Each time an expert of the busiest position and a lighter one of another position change places:
    of the pairs that leave both positions with the least, up to a small difference, that whose
    experts are trained where they come to be.

    Args:
        slots: Expert in each slot, each expert once.
        load: [experts] tokens of each expert.
        held: [experts, positions] ranks that train an expert.
    """
    num_positions = held.shape[1]
    position = np.empty(len(slots), np.int64)
    position[np.array(slots)] = np.arange(len(slots)) // (len(slots) // num_positions)
    sums = load_of_positions(slots, load, num_positions)
    least = max(1, int(_LEAST_SWAP * load.sum() / num_positions))
    while True:
        busiest = int(sums.argmax())
        ours, theirs = np.flatnonzero(position == busiest), np.flatnonzero(position != busiest)
        moved = load[ours][:, None] - load[theirs][None]
        other = position[theirs]
        higher = np.maximum(sums[busiest] - moved, sums[other][None] + moved)
        if not higher.size or higher.min() > sums[busiest] - least:
            return slots_at(position.tolist())
        trained = held[ours][:, other] + held[theirs, busiest][None]
        trained -= held[ours, busiest][:, None] + held[theirs, other][None]
        good = higher <= higher.min() + least // 2
        row, column = np.unravel_index(
            np.where(good, trained, trained.min() - 1).argmax(), good.shape
        )
        change = moved[row, column]
        position[ours[row]], position[theirs[column]] = other[column], busiest
        sums[busiest] -= change
        sums[other[column]] += change


@dataclass(frozen=True, slots=True)
class BalancePlan:
    """What the load of a rollout says about the placement of experts.

    Attributes:
        slots: Layer -> expert in each slot, of the placement to take; ``None``: that in use stays.
        imbalance: Tokens of the busiest positions over the mean, of all layers, as placed now.
        reachable: The same of the better placement, whether or not it is taken.
    """

    slots: Mapping[int, Slots] | None
    imbalance: float
    reachable: float


def plan_balance(
    current: Mapping[int, Slots],
    start: Mapping[int, Slots],
    load: TokenCounts,
    trainer: TrainerExperts,
) -> BalancePlan:
    """Find a placement for the load, and decide whether it is worth a new plan of the weight sync.

    Layers run one after another, so what counts is the sum of their busiest positions. A placement
    is looked for from where training holds the experts, and is dropped where it saves less than
    :data:`LEAST_GAIN` of that sum.

    Args:
        current: Layer -> expert in each slot, as the engine has them.
        start: The same of the placement that keeps most experts where they are trained.
        load: [layers, experts] tokens of each expert, in the order of ``current``.
        trainer: Where training holds the experts.
    """
    num_positions = trainer.engine.size
    found: dict[int, Slots] = {}
    before = after = 0
    for row, layer in zip(load, current, strict=True):
        held = np.array(trainer.held(layer), np.int64)
        found[layer] = balanced(start[layer], row, held)
        before += int(load_of_positions(current[layer], row, num_positions).max())
        after += int(load_of_positions(found[layer], row, num_positions).max())
    mean = load.sum() / num_positions
    if not mean:
        return BalancePlan(None, 1.0, 1.0)
    taken = found if after <= (1 - LEAST_GAIN) * before else None
    return BalancePlan(taken, before / mean, after / mean)
