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
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from math import gcd
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mindspeed_rl.core.boxes import Box, ParamView
from mindspeed_rl.core.garbage import without_collection
from mindspeed_rl.weight_layouts.base import (
    Piece,
    Shard,
    ShardLayout,
    expert_name,
    locate,
)
from mindspeed_rl.weights.sources import RegionDemand, SourceAssignment, assign_sources


class TensorRun(NamedTuple):
    """Tensors of one kind and layer that belong to neighbouring experts and are placed alike.

    A tensor outside of experts is a run of one.

    Attributes:
        kind: Name of the HF tensors, with ``{e}`` for the expert.
        first: Number of the first expert.
        num_tensors: Number of experts.
        source_first: First expert of the longest such run of the source, of which this is a part.
        target_first: The same of the target.
    """

    kind: str
    first: int
    num_tensors: int
    source_first: int
    target_first: int

    @property
    def hf_name(self) -> str:
        """Name of the first tensor."""
        return expert_name(self.kind, self.first)


class Place(NamedTuple):
    """Where one side of a transfer keeps a rectangle.

    Attributes:
        box: Rectangle in the view of a parameter.
        view: View of the first tensor's parameter. Where the tensors of a run share one, the
            others follow at the next positions of its last index.
    """

    box: Box
    view: ParamView


@dataclass(frozen=True, eq=False, slots=True)
class Rectangle:
    """A rectangle of an HF tensor, and where both sides keep it. Layers that are alike share it."""

    hf_box: Box
    src: Place
    dst: Place


class Transfer(NamedTuple):
    """A rectangle that is copied from one rank's parameter to that of another or the same rank.

    It is the same rectangle of every tensor of a run. Hop 1 reads the source layout. Hop 2 follows
    it and forwards what the sender itself received in hop 1: ``src_rank`` is then one of the target
    layout. The own rank's parameters are those of each tensor of the run, or the one that they
    share; there are no names on another rank's side.
    """

    src_rank: int
    dst_rank: int
    hf_name: str
    rectangle: Rectangle
    src_params: tuple[str, ...]
    dst_params: tuple[str, ...]
    hop: int = 1
    num_tensors: int = 1

    @property
    def hf_box(self) -> Box:
        return self.rectangle.hf_box

    @property
    def num_elements(self) -> int:
        return self.hf_box.num_elements * self.num_tensors

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the elements in a message; a run of several tensors comes first."""
        size = self.hf_box.size
        return size if self.num_tensors == 1 else (self.num_tensors, *size)

    def parts(self, count: int) -> tuple[Transfer | None, ...]:
        """Cut the transfer into ``count`` slices; an empty slice is ``None``."""
        if count == 1:
            return (self,)
        src, dst, name, whole, read, written, hop, num_tensors = self
        return tuple(
            Transfer(src, dst, name, part, read, written, hop, num_tensors) if part else None
            for part in _parts(whole, count)
        )


@lru_cache(maxsize=1 << 14)
def _parts(whole: Rectangle, count: int) -> tuple[Rectangle | None, ...]:
    """Slice a rectangle on both sides; cached, because layers are sliced alike."""
    src, dst = whole.src, whole.dst
    return tuple(
        Rectangle(boxes[0], Place(boxes[1], src.view), Place(boxes[2], dst.view)) if boxes else None
        for boxes in _slices((whole.hf_box, src.box, dst.box), count)
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


@dataclass(frozen=True, eq=False, slots=True)
class ArrivingBoxes:
    """Rectangles of the tensors of a run that have to arrive somewhere.

    Attributes:
        rectangles: Where each has to arrive, and the rectangle of the HF tensor.
        elements: [n] number of elements of each.
        extents: Their sizes along the dimension that slices cut.
        widths: Distances of ranks that need the same rectangle.
    """

    rectangles: tuple[tuple[Cell, Box], ...]
    elements: NDArray[np.int64]
    extents: frozenset[int]
    widths: frozenset[int]

    @classmethod
    def of(cls, rectangles: Sequence[tuple[Cell, Box]]) -> ArrivingBoxes:
        several = (ranks for dst, _ in rectangles for ranks in dst.owner_ranks)
        return cls(
            tuple(rectangles),
            np.array([box.num_elements for _, box in rectangles], np.int64),
            frozenset(box.size[box.sliced_dim] for _, box in rectangles),
            frozenset(ranks.step for ranks in several if len(ranks) > 1),
        )


class Overlap(NamedTuple):
    """The rectangles of a run that have to arrive, in an order of all ranks.

    Attributes:
        cells: Where the source layout holds each rectangle.
        arrivals: The rectangles.
        assigned: Who sends which of them to whom; a slice is a rectangle.
    """

    cells: tuple[Cell, ...]
    arrivals: ArrivingBoxes
    assigned: SourceAssignment


class _Sides(NamedTuple):
    """How both layouts place some tensors.

    Attributes:
        source: Placement key of the source.
        target: Placement key of the target.
        period: Number of layers and experts whose rotations even out what the ranks send.
    """

    source: Hashable
    target: Hashable
    period: tuple[int, int]


class _Common(NamedTuple):
    """What cells and needs have in common.

    Attributes:
        of_cells: For each cell the rectangles that have to arrive from it, with who needs them.
        arrivals: All of these rectangles, unsliced.
    """

    of_cells: tuple[tuple[tuple[tuple[Cell, Box], ...], tuple[RegionDemand, ...]], ...]
    arrivals: ArrivingBoxes


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
        self._sides: dict[str, _Sides] = {}
        self._target_runs: dict[Hashable, dict[int, range]] = {}
        self._runs: dict[Hashable, tuple[tuple[int, int, int, int], ...]] = {}
        self._cells: dict[Hashable, tuple[list[Cell], int]] = {}
        self._boxes: dict[tuple[Box, ...], int] = {}
        self._needs: dict[Hashable, list[Cell]] = {}
        self._common: dict[Hashable, _Common] = {}
        self._known: dict[Hashable, Overlap] = {}
        self._twice: dict[Hashable, bool] = {}

    def runs(self, kind: str, experts: range) -> Iterator[TensorRun]:
        """Return the runs of a kind of tensor that contain some neighbouring experts."""
        sides = self.sides(kind)
        key = sides.source, sides.target, experts
        if key not in self._runs:
            self._runs[key] = tuple(self._cut_into_runs(kind, experts))
        return (TensorRun(kind, *numbers) for numbers in self._runs[key])

    def _cut_into_runs(self, kind: str, experts: range) -> Iterator[tuple[int, int, int, int]]:
        target_runs = self._target_runs.setdefault(self.sides(kind).target, {})
        end, ours = 0, range(0)
        for expert in experts:
            if expert < end:
                continue
            if expert not in ours:
                ours = self.source.run_of(expert_name(kind, expert))
            if expert not in target_runs:
                theirs = self.target.run_of(expert_name(kind, expert))
                target_runs.update(dict.fromkeys(theirs, theirs))
            theirs = target_runs[expert]
            first, end = max(ours.start, theirs.start), min(ours.stop, theirs.stop)
            yield first, end - first, ours.start, theirs.start

    def sides(self, kind: str) -> _Sides:
        """Return how both layouts place a kind of tensor: equal where all is placed alike."""
        known = self._sides.get(kind)
        if known is None:
            name = expert_name(kind, 0)
            keys = self.source.placement_key(name), self.target.placement_key(name)
            known = self._sides[kind] = _Sides(*keys, self.source.rotation_period(name))
        return known

    def held_by(self, rank: int) -> list[TensorRun]:
        """Return the runs of which a rank holds something on either side, in an order of all."""
        held = dict.fromkeys((*self.source.held_runs(rank), *self.target.held_runs(rank)))
        found = dict.fromkeys(run for kind, experts in held for run in self.runs(kind, experts))
        return sorted(found, key=lambda run: run.hf_name)

    def of(self, run: TensorRun) -> Overlap:
        """Return the rectangles of a run.

        Cells and rectangles are those of a tensor that is placed like the run: of one of its
        experts, of another layer. Each run has a rotation of its own, so
        that all owner ranks of a tensor send some of its shards. Matrices are also sliced where a
        stage has too few layers to even out what its ranks send.
        """
        sides = self.sides(run.kind)
        key = sides, run.first, run.num_tensors
        known = self._known.get(key)
        if known is None:
            known = self._found(run, sides)
            if known.assigned.is_balanced:
                self._known[key] = known
        return known

    def keeps_twice(self, run: TensorRun) -> bool:
        """Tell whether some rank keeps a tensor of the target twice; it is then a run of one."""
        if run.num_tensors > 1:
            return False
        key = self.sides(run.kind).target, run.first
        if key not in self._twice:
            self._twice[key] = bool(local_duplicates_of(self.target, run.hf_name))
        return self._twice[key]

    def _found(self, run: TensorRun, sides: _Sides) -> Overlap:
        held, needed = (sides.source, run.source_first), (sides.target, run.target_first)
        if held not in self._cells:
            cells = cells_of(self.source, run.hf_name)
            boxes = tuple(cell.box for cell in cells)
            self._cells[held] = cells, self._boxes.setdefault(boxes, len(self._boxes))
        if needed not in self._needs:
            self._needs[needed] = needs_of(self.target, run.hf_name)
        cells, number = self._cells[held]
        if (number, needed) not in self._common:
            self._common[number, needed] = _common_of(cells, self._needs[needed])
        of_cells, arrivals = self._common[number, needed]
        rotation = self._rotation_of(run, sides.period[1])
        # Only layers count as turns: some experts are needed where they are and are not sent.
        several = [
            assign_sources(
                cell.owner_ranks,
                demands,
                self.ranks_per_node,
                rotation,
                sides.period[0],
                self.relay,
            )
            for cell, (_, demands) in zip(cells, of_cells, strict=True)
            if demands
        ]
        assigned = SourceAssignment.joined(several)
        senders = [cell for cell, (common, _) in zip(cells, of_cells, strict=True) for _ in common]
        whole = Overlap(tuple(senders), arrivals, assigned)
        return _sliced(whole) if max(assigned.num_slices) > 1 else whole

    def _rotation_of(self, run: TensorRun, experts_per_rank: int) -> int:
        """Return the number that rotates the choice among equal sources of a run.

        Runs and layers of one rank have consecutive numbers.
        """
        pattern, layer, _ = locate(run.kind)
        number = layer * experts_per_rank + run.first
        return _round_robin_offset(pattern) + number // run.num_tensors


def _sliced(whole: Overlap) -> Overlap:
    """Cut the rectangles into the slices that are assigned; empty ones are left out."""
    cells, arrivals, assigned = whole
    rectangles = zip(cells, arrivals.rectangles, assigned.num_slices, strict=True)
    slices = [
        (cell, (dst, box.slice(i, count)))
        for cell, (dst, box), count in rectangles
        for i in range(count)
    ]
    present = np.array([box.num_elements > 0 for _, (_, box) in slices])
    senders, parts = zip(*compress(slices, present), strict=True)
    return Overlap(senders, ArrivingBoxes.of(parts), assigned.only(present))


def _common_of(cells: Sequence[Cell], needs: Sequence[Cell]) -> _Common:
    """Intersect what is held with what has to arrive."""
    boxes = (tuple(cell.box for cell in several) for several in (cells, needs))
    found = [tuple((needs[i], box) for i, box in several) for several in _intersections(*boxes)]
    together = [pair for several in found for pair in several]
    return _Common(
        tuple((several, _demands(several)) for several in found), ArrivingBoxes.of(together)
    )


def _demands(several: Sequence[tuple[Cell, Box]]) -> tuple[RegionDemand, ...]:
    """Return who needs some rectangles; only the proportion of their sizes matters."""
    unit = gcd(*(box.num_elements for _, box in several))
    return tuple(
        RegionDemand(dst.owner_ranks, box.num_elements // unit, len(box.size) > 1)
        for dst, box in several
    )


@lru_cache(maxsize=1 << 12)
def _intersections(
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
    hop: int
    rectangle: Rectangle
    src: Piece
    dst: Piece


def _moves_of(rank: int, run: TensorRun, overlap: Overlap) -> list[_Move]:
    """Return what a rank sends, receives and copies of a run."""

    def place(piece: Piece, box: Box) -> Place:
        view = piece.view
        if view.index:
            view = view.shifted(run.first - locate(piece.hf_name)[2])
        return Place(box.moved(piece.hf_box, piece.param_box), view)

    cells, arrivals, assigned = overlap
    own = np.flatnonzero((assigned.src == rank) | (assigned.dst == rank))
    ends = (column[own].tolist() for column in assigned[:4])
    moves: list[_Move] = []
    for number, hop, sender, receiver in zip(*ends, strict=True):
        dst, box = arrivals.rectangles[number]
        read = (dst if hop == 2 else cells[number]).piece_of(sender)
        written = dst.piece_of(receiver)
        rectangle = Rectangle(box, place(read, box), place(written, box))
        moves.append(_Move(sender, receiver, max(1, hop), rectangle, read, written))
    return moves


class _Params:
    """The own rank's parameters of runs."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[str, ...]] = {}

    def of(self, layout: ShardLayout, run: TensorRun, piece: Piece) -> tuple[str, ...]:
        """Return the parameters of a run, where ``piece`` is of a tensor placed like the run."""
        # Runs that lie in one parameter share it.
        first, count = (0, 1) if piece.view.index else (run.first, run.num_tensors)
        key = run.kind, first, id(piece)
        known = self._known.get(key)
        if known is None:
            names = (expert_name(run.kind, run.first + i) for i in range(count))
            known = self._known[key] = tuple(layout.param_like(piece, name) for name in names)
        return known


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
    known: dict[int, tuple[Overlap, list[_Move]]] = {}
    params = _Params()
    for run in overlaps.held_by(rank):
        found, hf_name = overlaps.of(run), run.hf_name
        if id(found) not in known:
            known[id(found)] = found, _moves_of(rank, run, found)
        for sender, receiver, hop, rectangle, read, written in known[id(found)][1]:
            layout = target if hop == 2 else source
            src = params.of(layout, run, read) if sender == rank else ()
            dst = params.of(target, run, written) if receiver == rank else ()
            where = copies if sender == receiver else sends if sender == rank else receives
            ends = sender, receiver, hf_name, rectangle, src, dst
            where.append(Transfer(*ends, hop, run.num_tensors))
        if overlaps.keeps_twice(run):
            local_duplicates += _local_duplicates(target, hf_name, rank)
    digest = layout_digest(source, target, ranks_per_node, relay)
    return ReshardPlan(
        rank, tuple(sends), tuple(receives), tuple(copies), tuple(local_duplicates), digest
    )


def _local_duplicates(target: ShardLayout, hf_name: str, rank: int) -> Iterator[Transfer]:
    """Yield copies of whole pieces to others of the same rank and layout."""
    for again, once in local_duplicates_of(target, hf_name).items():
        if rank in again.owner_ranks:
            pieces = once.piece, again.piece
            src, dst = (Place(piece.param_box, piece.view) for piece in pieces)
            rectangle = Rectangle(once.piece.hf_box, src, dst)
            read, written = ((piece.param,) for piece in pieces)
            yield Transfer(rank, rank, hf_name, rectangle, read, written)


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
