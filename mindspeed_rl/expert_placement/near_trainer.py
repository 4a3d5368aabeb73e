"""Which rank of an engine gets which experts: where training holds them, they need not travel.

An engine that spreads experts over its ranks may put any of them anywhere, in each layer on its
own. Training holds the experts of a layer on the ranks of one pipeline stage. This is pure
arithmetic, alike on all ranks; it imports neither torch nor numpy, because a dry run uses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TypeVar

from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.models.expert_rules import ExpertRow
from mindspeed_rl.weight_layouts.megatron import MegatronLayout
from mindspeed_rl.weight_layouts.rollout import RolloutLayout, Slots

RolloutLayoutT = TypeVar("RolloutLayoutT", bound=RolloutLayout)
Counts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class TrainerExperts:
    """Where training holds the experts of each layer, seen from the positions in an engine.

    Ranks at one position of all engines hold the same experts in a rollout.

    Attributes:
        source: Layout of the trainer.
        engine: Ranks of the engines, which spread whole experts over their positions.
    """

    source: MegatronLayout
    engine: EngineLayout

    @cached_property
    def rows(self) -> dict[int, ExpertRow]:
        """For each layer with experts, a row of them: training holds all rows alike."""
        rows = (row for row in self.source.present_rows if isinstance(row, ExpertRow))
        return {layer: row for row in rows for layer in row.layers(self.source.spec)}

    @cached_property
    def _counts_of_stages(self) -> dict[int, Counts]:
        return {}

    def held(self, layer: int) -> Counts:
        """Count the ranks that train an expert, whole or a share of it: [experts][positions]."""
        row = self.rows[layer]
        stage = self.source.pipeline_stage_of(row, layer)
        if stage not in self._counts_of_stages:
            experts = range(self.source.spec.num_experts)
            self._counts_of_stages[stage] = tuple(self._count(row, layer, e) for e in experts)
        return self._counts_of_stages[stage]

    def _count(self, row: ExpertRow, layer: int, expert: int) -> tuple[int, ...]:
        counts = [0] * self.engine.size
        for place in self.source.places(row, layer, expert):
            for placed in place.shares:
                for rank in placed.owner_ranks:
                    counts[self.engine.expert_rank(rank)] += 1
        return tuple(counts)


def kept(slots: Slots, held: Counts) -> int:
    """Count how often a rank of an engine trains an expert that it gets, or a share of it.

    Args:
        slots: The expert in each slot of a layer.
        held: [experts][positions] ranks that train an expert.
    """
    per_position = len(slots) // len(held[0])
    return sum(held[expert][slot // per_position] for slot, expert in enumerate(slots))


def near_trainer(held: Counts) -> Slots:
    """Place every expert once, as many on each position, where many ranks train it.

    Pairs of expert and position are taken in descending order of ranks. That keeps as much as
    possible where the sizes of trainer and engine divide each other.

    Args:
        held: [experts][positions] ranks that train an expert.
    """
    positions = range(len(held[0]))
    room = [len(held) // len(positions)] * len(positions)
    placed: list[int | None] = [None] * len(held)
    for expert, position in _by_ranks(held):
        if placed[expert] is None and room[position]:
            placed[expert] = position
            room[position] -= 1
    free = iter([position for position in positions for _ in range(room[position])])
    found = [next(free) if position is None else position for position in placed]
    return slots_at(found)


def _by_ranks(held: Counts) -> Iterator[tuple[int, int]]:
    """Yield pairs of expert and position, those with the most ranks first, none without a rank."""
    pairs = [
        (-count, expert, position)
        for expert, counts in enumerate(held)
        for position, count in enumerate(counts)
        if count
    ]
    yield from ((expert, position) for _, expert, position in sorted(pairs))


def slots_at(positions: Sequence[int]) -> Slots:
    """Return the slots of experts whose positions are given; those of a position ascend."""
    return tuple(sorted(range(len(positions)), key=lambda expert: (positions[expert], expert)))


def placed_near_trainer(source: MegatronLayout, target: RolloutLayoutT) -> RolloutLayoutT:
    """Return the target with experts where training holds them, in the layers where that helps.

    Args:
        source: Layout of the trainer.
        target: Layout of an engine with expert parallelism and without redundant experts.
    """
    trainer = TrainerExperts(source, target.engine)
    of_stages: dict[Counts, Slots] = {}
    moved: list[tuple[int, Slots]] = []
    for layer in target.spec.expert_layers:
        held = trainer.held(layer)
        if held not in of_stages:
            of_stages[held] = near_trainer(held)
        if kept(of_stages[held], held) > kept(target.experts_at(layer), held):
            moved.append((layer, of_stages[held]))
    return replace(target, layer_experts=tuple(moved))


def lacking_elements(source: MegatronLayout, target: RolloutLayout) -> float:
    """Return the elements of experts that a rank gets without training them, mean over ranks.

    Args:
        source: Layout of the trainer.
        target: Layout of an engine with expert parallelism.
    """
    trainer, spec = TrainerExperts(source, target.engine), target.spec
    total = 0.0
    for row in (row for row in target.present_rows if isinstance(row, ExpertRow)):
        for layer in row.layers(spec):
            slots = target.experts_at(layer)
            copies = len(slots) * target.engine.num_replicas
            trained = kept(slots, trainer.held(layer)) / source.parallel.etp
            size = sum(map(prod, row.hf_shapes(spec.at(layer)).values()))
            total += (copies - trained) * size
    return total / target.engine.world
