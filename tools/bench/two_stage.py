"""The CANN recipe's way: dense tensors whole on every rank, experts where they are needed.

Dense tensors of the layers are gathered over tensor parallelism inside their stage, then over the
pipeline; embedding and head go the plain way. Expert shards are broadcast over the pipeline, then
an all-to-all-v inside the training tensor-and-expert group brings each rank its own. Buckets
instead of single tensors, preallocated, as in ``gather``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bench.gather import GatheredRounds
from bench.staging import (
    Copy,
    Kind,
    Model,
    Overlap,
    Round,
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
from bench.wire import TrainerGroups, Wire

# [round][place in the group] -> rectangles
_ByPeer = list[list[list[Overlap]]]


class ExpertExchange:
    """Experts of all stages, round by round.

    Args:
        model: layouts and weights.
        params: experts of all stages.
        groups: of the trainer.
        wire: counts.
        bucket_bytes: bound of the staged shards plus what is sent and received of a round.
    """

    def __init__(
        self,
        model: Model,
        params: Sequence[StageParam],
        groups: TrainerGroups,
        wire: Wire,
        bucket_bytes: int,
    ) -> None:
        self._model, self._wire, self._groups = model, wire, groups
        pp = model.source.parallel.pp
        # a shard, at most as much sent, and about as much received
        self._rounds = list(make_rounds(params, pp, bucket_bytes // (3 * pp)))
        self._round_of = {
            (b.stage, p.name): i
            for i, part in enumerate(self._rounds)
            for b in part
            for p in b.params
        }
        pool = new_pool(max(num_staged(r, 1) * dtype_of(r).itemsize for r in self._rounds))
        self._staged = [stage_round(part, 1, pool) for part in self._rounds]
        self._stage = model.source.parallel.coords(model.rank).pp
        self._sends, self._receives, self._own = self._find()
        self._send_sizes = [[_size(peer) for peer in part] for part in self._sends]
        self._receive_sizes = [[_size(peer) for peer in part] for part in self._receives]
        sizes = [dtype_of(part).itemsize for part in self._rounds]
        self._outgoing, self._incoming = (
            new_pool(max(sum(s) * n for s, n in zip(table, sizes, strict=True)))
            for table in (self._send_sizes, self._receive_sizes)
        )

    def _find(self) -> tuple[_ByPeer, _ByPeer, _ByPeer]:
        """Rectangles by round and peer that are sent, received, and kept."""
        model, block = self._model, self._groups.block
        kinds, size = hf_kinds(model.source), len(block.ranks)
        sends, receives, own = (self._no_rectangles() for _ in range(3))
        for place, peer in enumerate(block.ranks):
            for overlap in overlaps(
                model.source, model.target, peer, lambda name: kinds.get(name) == "expert"
            ):
                sender = overlap.src.holders[0] % size
                number = self._round_of[self._key(overlap)]
                if peer == model.rank:
                    kept = own if sender == block.index else receives
                    kept[number][sender].append(overlap)
                elif sender == block.index:
                    sends[number][place].append(overlap)
        return sends, receives, own

    def _no_rectangles(self) -> _ByPeer:
        return [[[] for _ in self._groups.block.ranks] for _ in self._rounds]

    def _key(self, overlap: Overlap) -> tuple[int, str]:
        stage = self._model.source.parallel.coords(overlap.src.holders[0]).pp
        return stage, overlap.src.piece.param

    def run(self) -> None:
        """Broadcast, exchange and place everything. Collective: the world."""
        for number, part in enumerate(self._rounds):
            self._run_round(number, part)

    def _run_round(self, number: int, part: Round) -> None:
        model, staged = self._model, self._staged[number]
        for param in part[self._stage].params:
            staged.shown[self._stage, param.name, 0].copy_(model.read[param.name].detach())
        self._wire.spread([s.view(-1) for s in staged.stages], self._groups.pp)
        sends = [o for peer in self._sends[number] for o in peer]
        receives = [o for peer in self._receives[number] for o in peer]
        outgoing, incoming = (
            pool.view(dtype_of(part))[: sum(sizes[number])]
            for pool, sizes in (
                (self._outgoing, self._send_sizes),
                (self._incoming, self._receive_sizes),
            )
        )
        for shown, overlap in _flat_views(outgoing, sends):
            shown.copy_(overlap.of_source(staged.shown[*self._key(overlap), 0]))
        self._wire.exchange(
            incoming,
            outgoing,
            self._receive_sizes[number],
            self._send_sizes[number],
            self._groups.block,
        )
        for shown, overlap in _flat_views(incoming, receives):
            overlap.of_target(model.write).copy_(shown)
        for overlap in (o for peer in self._own[number] for o in peer):
            staged_shard = staged.shown[*self._key(overlap), 0]
            Copy(overlap.of_target(model.write), overlap.of_source(staged_shard)).run()


def _size(several: Sequence[Overlap]) -> int:
    return sum(overlap.box.num_elements for overlap in several)


def _flat_views(
    flat: torch.Tensor, several: Sequence[Overlap]
) -> list[tuple[torch.Tensor, Overlap]]:
    """The place of each rectangle in a message, in its shape."""
    views, start = [], 0
    for overlap in several:
        size = overlap.box.num_elements
        views.append((flat[start : start + size].view(overlap.box.size), overlap))
        start += size
    return views


class TwoStageReshard:
    """The whole way; allocates once.

    Args:
        model: layouts and weights.
        groups: of the trainer.
        bucket_bytes: bound of the staging of a round.
    """

    def __init__(self, model: Model, groups: TrainerGroups, bucket_bytes: int) -> None:
        self.wire = Wire()
        params = stage_params(model)
        kinds: list[Kind] = ["split", "whole", "end"]
        self._parts: list[GatheredRounds | ExpertExchange] = [
            GatheredRounds(
                model,
                mine,
                groups,
                self.wire,
                "stages first" if mine[0].kind == "end" else "tensor parallel first",
                bucket_bytes,
            )
            for mine in ([p for p in params if p.kind == kind] for kind in kinds)
            if mine
        ]
        if experts := [p for p in params if p.kind == "expert"]:
            self._parts.append(ExpertExchange(model, experts, groups, self.wire, bucket_bytes))

    def run(self) -> None:
        """Reshard once. Collective: the world."""
        for part in self._parts:
            part.run()
