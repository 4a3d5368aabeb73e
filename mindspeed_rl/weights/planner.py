"""The plan of a reshard: which rank sends which rectangle to which rank.

HF tensors are the common coordinates. A destination needs the intersection of its own piece with
each rectangle that the source layout cuts a tensor into; among the ranks that hold that rectangle
exactly one sends (:mod:`~mindspeed_rl.weights.sources`). Planning is pure arithmetic that each rank
does alone. A rank looks only at tensors of which it holds something on either side, so a plan costs
O(own transfers). Neighbouring experts that both sides place alike are a run: one of them is
planned, and a transfer carries the rectangle of all of them.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from mindspeed_rl.core.boxes import Box, ParamView
from mindspeed_rl.core.garbage import without_collection
from mindspeed_rl.weight_layouts.base import (
    Piece,
    Shard,
    ShardLayout,
    expert_name,
    layer_name,
    locate,
)
from mindspeed_rl.weights.sources import RegionDemand, SourceAssignment, assign_sources


@dataclass(frozen=True, slots=True)
class TensorRun:
    """Tensors of one kind and layer that belong to neighbouring experts and are placed alike.

    A tensor outside of experts is a run of one.

    Attributes:
        hf_name: HF tensor of the first expert.
        count: Number of experts.
    """

    hf_name: str
    count: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where one side of a transfer keeps its rectangles.

    Attributes:
        params: The own rank's parameter of each tensor of the run, or the one that they share; no
            names on another rank's side.
        box: Rectangle in the view of each of these parameters.
        view: View of the first tensor's parameter. Where the tensors of a run share one, the
            others follow at the next positions of its last index.
    """

    params: tuple[str, ...]
    box: Box
    view: ParamView


@dataclass(frozen=True, slots=True)
class Transfer:
    """A rectangle that is copied from one rank's parameter to that of another or the same rank.

    It is the same rectangle of every tensor of a run. Hop 1 reads the source layout. Hop 2 follows
    it and forwards what the sender itself received in hop 1: ``src`` is then in the target layout.
    """

    src_rank: int
    dst_rank: int
    hf_name: str
    hf_box: Box
    src: Place
    dst: Place
    hop: int = 1
    count: int = 1

    @property
    def num_elements(self) -> int:
        return self.hf_box.num_elements * self.count

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the elements in a message; a run of several tensors comes first."""
        return self.hf_box.size if self.count == 1 else (self.count, *self.hf_box.size)

    def parts(self, count: int) -> tuple[Transfer | None, ...]:
        """Cut the transfer into ``count`` slices; an empty slice is ``None``."""
        if count == 1:
            return (self,)
        return tuple(
            Transfer(
                self.src_rank,
                self.dst_rank,
                self.hf_name,
                boxes[0],
                Place(self.src.params, boxes[1], self.src.view),
                Place(self.dst.params, boxes[2], self.dst.view),
                self.hop,
                self.count,
            )
            if boxes
            else None
            for boxes in _slices((self.hf_box, self.src.box, self.dst.box), count)
        )


@lru_cache(maxsize=1 << 12)
def _slices(boxes: tuple[Box, ...], count: int) -> tuple[tuple[Box, ...] | None, ...]:
    """Slice rectangles of one size; cached, because layers and experts are sliced alike."""
    slices = (tuple(box.slice(index, count) for box in boxes) for index in range(count))
    return tuple(several if several[0].num_elements else None for several in slices)


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """The messages and the local copies of one rank in a reshard.

    ``sends``, ``receives`` and ``copies`` have the same order on all ranks, so that both ends of a
    message list its rectangles alike. ``local_duplicates`` copy within the target what the rank
    keeps twice (a redundant expert next to its original) once it has arrived. ``digest`` is equal
    on all ranks of a reshard.
    """

    rank: int
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    copies: tuple[Transfer, ...]
    local_duplicates: tuple[Transfer, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class Cell:
    """A rectangle that a layout cuts a tensor into, and the ranks that hold it."""

    box: Box
    shards: tuple[Shard, ...]
    owner_ranks: tuple[range, ...]

    @classmethod
    def of(cls, shards: tuple[Shard, ...]) -> Cell:
        """Make the cell of all shards of one rectangle, replicas included."""
        return cls(shards[0].piece.hf_box, shards, tuple(shard.owner_ranks for shard in shards))

    def is_held_by(self, rank: int) -> bool:
        """Tell whether ``rank`` holds the rectangle."""
        return any(rank in several for several in self.owner_ranks)

    def piece_of(self, rank: int) -> Piece:
        """Return the piece in which ``rank`` holds the rectangle."""
        return next(shard.piece for shard in self.shards if rank in shard.owner_ranks)


def cells_of(source: ShardLayout, hf_name: str) -> list[Cell]:
    """Return the rectangles that together hold every element of a tensor exactly once."""
    shards = source.shards(hf_name)
    if len(shards) == 1:
        return [Cell.of(shards)]
    same: dict[Box, list[Shard]] = {}
    for shard in shards:
        same.setdefault(shard.piece.hf_box, []).append(shard)
    return [Cell.of(tuple(same[s.piece.hf_box])) for s in shards if not s.is_replica]


def local_duplicates_of(target: ShardLayout, hf_name: str) -> dict[Shard, Shard]:
    """Map each shard that the same ranks already keep in another shard to that other shard."""
    shards = target.shards(hf_name)
    if len(shards) == 1:
        return {}
    first: dict[tuple[Box, range], Shard] = {}
    for shard in shards:
        first.setdefault((shard.piece.hf_box, shard.owner_ranks), shard)
    if len(first) == len(shards):
        return {}
    found = {shard: first[shard.piece.hf_box, shard.owner_ranks] for shard in shards}
    return {again: once for again, once in found.items() if again is not once}


def needs_of(target: ShardLayout, hf_name: str) -> list[Cell]:
    """Return the rectangles of a tensor that have to arrive, each with all ranks that need it.

    What a rank keeps twice arrives once (:func:`local_duplicates_of`).
    """
    shards = target.shards(hf_name)
    if len(shards) == 1:
        return [Cell.of(shards)]
    local_duplicates = local_duplicates_of(target, hf_name)
    same: dict[Box, list[Shard]] = {}
    for shard in shards:
        if shard not in local_duplicates:
            same.setdefault(shard.piece.hf_box, []).append(shard)
    return [Cell.of(tuple(several)) for several in same.values()]


@lru_cache(maxsize=4096)
def _round_robin_offset(pattern: str) -> int:
    """Return where the rotation starts for a kind of tensor."""
    return zlib.crc32(pattern.encode()) & 0xFFFF


def rotation_of(run: TensorRun, experts_per_rank: int = 1) -> int:
    """Return the number that rotates the choice among equal sources of a run.

    Runs and layers of one rank have consecutive numbers.
    """
    pattern, layer, expert = locate(run.hf_name)
    return _round_robin_offset(pattern) + (layer * experts_per_rank + expert) // run.count


def runs_of(
    source: ShardLayout, target: ShardLayout, pattern: str, experts: Iterable[int]
) -> Iterator[TensorRun]:
    """Yield the runs that begin at some experts, or contain the first of them.

    Args:
        source: Layout that is read.
        target: Layout that is written.
        pattern: Name of an HF tensor with ``{e}`` for the expert; a name without it is a run.
        experts: Ascending numbers of experts.
    """
    end = 0
    for expert in experts:
        if expert < end:
            continue
        name = expert_name(pattern, expert)
        ours, theirs = source.run_of(name), target.run_of(name)
        first, end = max(ours.start, theirs.start), min(ours.stop, theirs.stop)
        yield TensorRun(expert_name(pattern, first), end - first)


def held_runs(source: ShardLayout, target: ShardLayout, rank: int) -> list[TensorRun]:
    """Return the runs of which a rank holds something on either side, in an order of all ranks."""
    held = dict.fromkeys((*source.held_runs(rank), *target.held_runs(rank)))
    found = dict.fromkeys(
        run for pattern, experts in held for run in runs_of(source, target, pattern, experts)
    )
    return sorted(found, key=lambda run: run.hf_name)


class Overlap(NamedTuple):
    """A rectangle that has to arrive somewhere.

    Attributes:
        cell: Where the source layout holds it.
        dst: Where it has to arrive.
        box: The rectangle of the HF tensor.
        assigned: Who sends it to whom.
    """

    cell: Cell
    dst: Cell
    box: Box
    assigned: SourceAssignment


class Overlaps:
    """The rectangles of runs that have to arrive, found once for runs that are placed alike.

    Args:
        source: Layout that is read.
        target: Layout that is written.
        ranks_per_node: Number of ranks per node; sources on the same node are preferred.
        relay: Slice rectangles so that every destination on a node without a holder receives one
            slice from another node and forwards it to the other destinations on its node.
    """

    def __init__(
        self, source: ShardLayout, target: ShardLayout, ranks_per_node: int, relay: bool = False
    ) -> None:
        self.source, self.target = source, target
        self.ranks_per_node, self.relay = ranks_per_node, relay
        self._cells: dict[Hashable, list[Cell]] = {}
        self._needs: dict[Hashable, list[Cell]] = {}
        self._known: dict[Hashable, tuple[Overlap, ...]] = {}

    def of(self, run: TensorRun) -> tuple[Overlap, ...]:
        """Return the rectangles of a run, in an order of all ranks.

        Cells and rectangles are those of a tensor that is placed like the run: of one of its
        experts, of another layer. Each run has a rotation of its own, so
        that all owner ranks of a tensor send some of its shards. Matrices are also sliced where a
        stage has too few layers to even out what its ranks send.
        """
        name = run.hf_name
        places = self.source.placement_key(name), self.target.placement_key(name)
        key = *places, locate(name)[2], run.count
        known = self._known.get(key)
        if known is None:
            known = self._found(run, places)
            if all(overlap.assigned.is_balanced for overlap in known):
                self._known[key] = known
        return known

    def _sides(self, name: str, places: tuple[Hashable, Hashable]) -> tuple[list[Cell], list[Cell]]:
        key = places[0], self.source.run_of(name).start
        if key not in self._cells:
            self._cells[key] = cells_of(self.source, name)
        wanted = places[1], self.target.run_of(name).start
        if wanted not in self._needs:
            self._needs[wanted] = needs_of(self.target, name)
        return self._cells[key], self._needs[wanted]

    def _found(self, run: TensorRun, places: tuple[Hashable, Hashable]) -> tuple[Overlap, ...]:
        cells, needs = self._sides(run.hf_name, places)
        common = _common(tuple(cell.box for cell in cells), tuple(cell.box for cell in needs))
        num_layers, num_experts = self.source.rotation_period(run.hf_name)
        rotation = rotation_of(run, num_experts)
        found: list[Overlap] = []
        for cell, several in zip(cells, common, strict=True):
            if not several:
                continue
            wanted = [(needs[number], box) for number, box in several]
            demands = tuple(
                RegionDemand(d.owner_ranks, b.num_elements, len(b.size) > 1) for d, b in wanted
            )
            # Only layers count as turns: some experts are needed where they are and are not sent.
            assignments = assign_sources(
                cell.owner_ranks, demands, self.ranks_per_node, rotation, num_layers, self.relay
            )
            for (dst, box), slices in zip(wanted, assignments, strict=True):
                for i, assigned in enumerate(slices):
                    part = box if len(slices) == 1 else box.slice(i, len(slices))
                    if part.num_elements:
                        found.append(Overlap(cell, dst, part, assigned))
        return tuple(found)


@lru_cache(maxsize=1 << 12)
def _common(
    cells: tuple[Box, ...], needs: tuple[Box, ...]
) -> tuple[tuple[tuple[int, Box], ...], ...]:
    """Intersect rectangles: for each of the first, (number, common part) of some of the others."""
    return tuple(
        tuple((i, box) for i, need in enumerate(needs) if (box := cell.intersect(need)))
        for cell in cells
    )


class _Move(NamedTuple):
    """A transfer of any run at one place; the pieces are those of one of these runs."""

    sender: int
    receiver: int
    box: Box
    hop: int
    src: Piece
    dst: Piece


def _moves_of(rank: int, overlaps: Iterable[Overlap]) -> list[_Move]:
    """Return what a rank sends, receives and copies of a run."""
    moves: list[_Move] = []
    for cell, dst, box, assigned in overlaps:
        ends: list[tuple[int, int, int]] = []
        if needed := dst.is_held_by(rank):
            sender, hop = assigned.source_of(rank)
            ends.append((sender, rank, max(1, hop)))
        if needed or cell.is_held_by(rank):
            ends += ((rank, receiver, hop) for receiver, hop in assigned.served_by(rank))
        for sender, receiver, hop in ends:
            piece = (dst if hop == 2 else cell).piece_of(sender)
            moves.append(_Move(sender, receiver, box, hop, piece, dst.piece_of(receiver)))
    return moves


class _Names:
    """The tensors of a run, and the own rank's parameters for them."""

    def __init__(self, run: TensorRun) -> None:
        pattern, layer, first = locate(run.hf_name)
        named = layer_name(pattern, layer)
        self._first = first
        self._names = [expert_name(named, first + i) for i in range(run.count)]
        self._known: dict[Piece, tuple[str, ...]] = {}

    def place(self, layout: ShardLayout, piece: Piece, box: Box, own: bool) -> Place:
        """Return the place of a rectangle; ``piece`` has that of a tensor placed like the run."""
        view = piece.view
        if view.index:
            view = view.shifted(self._first - locate(piece.hf_name)[2])
        params: tuple[str, ...] = ()
        if own:
            known = self._known.get(piece)
            if known is None:
                names = self._names[:1] if piece.view.index else self._names
                known = tuple(layout.param_like(piece, name) for name in names)
                self._known[piece] = known
            params = known
        return Place(params, box.moved(piece.hf_box, piece.param_box), view)


@without_collection()
def plan_reshard(
    source: ShardLayout,
    target: ShardLayout,
    rank: int,
    ranks_per_node: int,
    *,
    relay: bool = False,
    overlaps: Overlaps | None = None,
) -> ReshardPlan:
    """Make the plan of one rank. Local and pure: every rank may call it alone.

    Args:
        source: Layout that is read.
        target: Layout that is written; it has the source's HF tensors (:func:`check_same_tensors`).
        rank: Rank to plan for.
        ranks_per_node: Number of ranks per node; sources on the same node are preferred.
        relay: Send each rectangle to a node once and forward it there (two hops).
        overlaps: Those of the same layouts, where they are used elsewhere as well.
    """
    overlaps = overlaps or Overlaps(source, target, ranks_per_node, relay)
    sends: list[Transfer] = []
    receives: list[Transfer] = []
    copies: list[Transfer] = []
    local_duplicates: list[Transfer] = []
    known: dict[int, tuple[object, list[_Move]]] = {}
    for run in held_runs(source, target, rank):
        names = _Names(run)
        found = overlaps.of(run)
        if id(found) not in known:
            known[id(found)] = found, _moves_of(rank, found)
        _, moves = known[id(found)]
        for sender, receiver, box, hop, piece, wanted in moves:
            layout = target if hop == 2 else source
            src = names.place(layout, piece, box, sender == rank)
            dst = names.place(target, wanted, box, receiver == rank)
            where = copies if sender == receiver else sends if sender == rank else receives
            where.append(Transfer(sender, receiver, run.hf_name, box, src, dst, hop, run.count))
        if run.count == 1:  # as every expert that a rank keeps twice
            local_duplicates += _local_duplicates(target, run.hf_name, rank)
    digest = layout_digest(source, target, ranks_per_node, relay)
    return ReshardPlan(
        rank, tuple(sends), tuple(receives), tuple(copies), tuple(local_duplicates), digest
    )


def _local_duplicates(target: ShardLayout, hf_name: str, rank: int) -> Iterator[Transfer]:
    """Yield copies of whole pieces to others of the same rank and layout."""
    for again, once in local_duplicates_of(target, hf_name).items():
        if rank in again.owner_ranks:
            pieces = once.piece, again.piece
            src, dst = (Place((piece.param,), piece.param_box, piece.view) for piece in pieces)
            yield Transfer(rank, rank, hf_name, once.piece.hf_box, src, dst)


def check_same_tensors(source: ShardLayout, target: ShardLayout) -> None:
    """Check that both sides have the same HF tensors. O(model).

    Raises:
        RuntimeError: Some tensors differ; the message names them.
    """
    differing = [
        f"{name}: {source.hf_shapes.get(name)} -> {target.hf_shapes.get(name)}"
        for name in sorted({*source.hf_shapes, *target.hf_shapes})
        if source.hf_shapes.get(name) != target.hf_shapes.get(name)
    ]
    if differing:
        raise RuntimeError("reshard: source and target disagree on " + "; ".join(differing[:5]))


def layout_digest(
    source: ShardLayout, target: ShardLayout, ranks_per_node: int, relay: bool = False
) -> str:
    """Return a hex digest of everything that a plan depends on, to compare between ranks."""
    state = hashlib.blake2b(repr((ranks_per_node, relay)).encode(), digest_size=32)
    for layout in (source, target):
        for text in layout.fingerprint():
            state.update(text.encode())
    return state.hexdigest()
