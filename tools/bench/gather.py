"""The peers' plain way, as verl does it: every whole tensor on every rank, then the engine's cut.

Every rank receives the training shards of all stages (pipeline broadcast), then those of all
tensor- and expert-parallel positions (all-gathers). Unlike verl, parameters travel in large buckets
of all stages at once through buffers that are allocated once, and the engine's rectangles are
copied straight out of the gathered shards, so that the way itself is measured and not its calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from bench.staging import (
    Copy,
    Kind,
    Model,
    StagedRound,
    StageParam,
    dtype_of,
    hf_kinds,
    make_rounds,
    new_pool,
    num_staged,
    overlaps,
    stage_params,
    stage_round,
)
from bench.wire import Group, TrainerGroups, Wire

Order = Literal["stages first", "tensor parallel first"]


class GatheredRounds:
    """Parameters of some kinds, whole on every rank, round by round.

    Args:
        model: layouts and weights.
        params: of one kind, all stages.
        groups: of the trainer.
        wire: counts.
        order: whether the shards of all stages come first, or the tensor inside the stage.
        bucket_bytes: bound of the staging of a round; a single parameter may exceed it.
    """

    def __init__(
        self,
        model: Model,
        params: Sequence[StageParam],
        groups: TrainerGroups,
        wire: Wire,
        order: Order,
        bucket_bytes: int,
    ) -> None:
        self._wire, self._pipeline, self._order = wire, groups.pp, order
        kind: Kind = params[0].kind
        self._axes = _gather_axes(kind, groups)
        self._slots = 1
        self._own = 0
        for axis in self._axes:
            self._own += axis.index * self._slots
            self._slots *= len(axis.ranks)
        pp = model.source.parallel.pp
        self._rounds = list(make_rounds(params, pp, bucket_bytes // (pp * self._slots)))
        largest = max(num_staged(r, self._slots) * dtype_of(r).itemsize for r in self._rounds)
        pool = new_pool(largest)
        self._staged = [stage_round(part, self._slots, pool) for part in self._rounds]
        stage = model.source.parallel.coords(model.rank).pp
        self._packs = [
            [
                Copy(staged.shown[stage, p.name, self._own], model.read[p.name].detach())
                for p in part[stage].params
            ]
            for part, staged in zip(self._rounds, self._staged, strict=True)
        ]
        self._stage = stage
        self._cuts = self._find_cuts(model, kind)

    def _find_cuts(self, model: Model, kind: Kind) -> list[list[Copy]]:
        """Engine rectangles by the round that brings them."""
        where = {
            (b.stage, p.name): i
            for i, part in enumerate(self._rounds)
            for b in part
            for p in b.params
        }
        cuts: list[list[Copy]] = [[] for _ in self._rounds]
        parallel, kinds = model.source.parallel, hf_kinds(model.source)
        for overlap in overlaps(
            model.source,
            model.target,
            model.rank,
            lambda name: (kinds.get(name) == "expert") == (kind == "expert"),
        ):
            holder, name = overlap.src.holders[0], overlap.src.piece.param
            stage = parallel.coords(holder).pp
            if (stage, name) not in where:
                continue
            number = where[stage, name]
            if kind == "expert":
                slot = holder % (parallel.etp * parallel.ep)
            else:
                slot = parallel.coords(holder).tp if self._slots > 1 else 0
            shard = self._staged[number].shown[stage, name, slot]
            cuts[number].append(Copy(overlap.of_target(model.write), overlap.of_source(shard)))
        return cuts

    def run(self) -> None:
        """Gather and cut everything. Collective: the world."""
        for packs, staged, cuts in zip(self._packs, self._staged, self._cuts, strict=True):
            for copy in packs:
                copy.run()
            if self._order == "stages first":
                self._wire.spread([s[self._own] for s in staged.stages], self._pipeline)
                for stage in range(len(staged.stages)):
                    self._gather(staged, stage)
            else:
                self._gather(staged, self._stage)
                self._wire.spread([s.view(-1) for s in staged.stages], self._pipeline)
            for copy in cuts:
                copy.run()

    def _gather(self, staged: StagedRound, stage: int) -> None:
        """Slots of one stage from all positions, innermost axis first: blocks that grow."""
        buffer, block = staged.stages[stage], 1
        for axis in self._axes:
            size = len(axis.ranks)
            first = self._own // (block * size) * (block * size)
            slots = [
                buffer[first + i * block : first + (i + 1) * block].view(-1) for i in range(size)
            ]
            self._wire.spread(slots, axis)
            block *= size


def _gather_axes(kind: Kind, groups: TrainerGroups) -> tuple[Group, ...]:
    if kind == "whole":
        return ()
    return (groups.etp, groups.ep) if kind == "expert" else (groups.tp,)


class GatherReshard:
    """The whole way; allocates once.

    Args:
        model: layouts and weights.
        groups: of the trainer.
        bucket_bytes: bound of the staging of a round.
    """

    def __init__(self, model: Model, groups: TrainerGroups, bucket_bytes: int) -> None:
        self.wire = Wire()
        params = stage_params(model)
        kinds: list[Kind] = ["split", "end", "whole", "expert"]
        self._parts = [
            GatheredRounds(model, mine, groups, self.wire, "stages first", bucket_bytes)
            for mine in ([p for p in params if p.kind == kind] for kind in kinds)
            if mine
        ]

    def run(self) -> None:
        """Reshard once. Collective: the world."""
        for part in self._parts:
            part.run()
