"""The plan of a reshard: which rank sends which rectangle to which rank.

HF tensors are the common coordinates. A destination needs the intersection of its own piece with
each rectangle that the source layout cuts a tensor into; among the ranks that hold that rectangle
exactly one sends (:mod:`~mindspeed_rl.weights.sources`). Planning is pure arithmetic that each rank
does alone. A rank looks only at tensors of which it holds something on either side, so a plan costs
O(own transfers).
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from mindspeed_rl.core.boxes import Box, ParamView
from mindspeed_rl.core.garbage import without_collection
from mindspeed_rl.weights.layouts.base import Piece, Shard, ShardLayout, locate
from mindspeed_rl.weights.sources import RegionDemand, SourceAssignment, assign_sources


@dataclass(frozen=True, slots=True)
class Transfer:
    """A rectangle that is copied from one rank's parameter to that of another or the same rank.

    Hop 1 reads the source layout. Hop 2 follows it and forwards what the sender itself received in
    hop 1: ``src_param`` is then a parameter of the target layout.
    """

    src_rank: int
    dst_rank: int
    hf_name: str
    hf_box: Box
    src_param: str
    src_box: Box
    src_view: ParamView
    dst_param: str
    dst_box: Box
    dst_view: ParamView
    hop: int = 1

    @property
    def num_elements(self) -> int:
        return self.hf_box.num_elements

    def parts(self, count: int) -> tuple[Transfer | None, ...]:
        """Cut the transfer into ``count`` slices; an empty slice is ``None``."""
        if count == 1:
            return (self,)
        slices = _slices((self.hf_box, self.src_box, self.dst_box), count)
        return tuple(
            replace(self, hf_box=boxes[0], src_box=boxes[1], dst_box=boxes[2]) if boxes else None
            for boxes in slices
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


def rotation_of(hf_name: str, experts_per_rank: int = 1) -> int:
    """Return the number that rotates the choice among equal sources of a tensor.

    Experts and layers of one rank have consecutive numbers.
    """
    pattern, layer, expert = locate(hf_name)
    return _round_robin_offset(pattern) + layer * experts_per_rank + expert


def overlaps(
    source: ShardLayout, target: ShardLayout, hf_name: str, ranks_per_node: int, relay: bool
) -> Iterator[tuple[Cell, Cell, Box, SourceAssignment]]:
    """Yield every rectangle of a tensor that has to arrive somewhere, with its sources.

    With ``relay``, rectangles are sliced so that every destination on a node without a holder
    receives one slice from another node and forwards it to the other destinations on its node. Each
    rectangle has a rotation of its own, so that all owner ranks of a tensor send some of its
    shards. Matrices are also sliced where a stage has too few layers to even out what its ranks
    send.
    """
    num_layers, num_experts = source.rotation_period(hf_name)
    rotation = rotation_of(hf_name, num_experts)
    needs = needs_of(target, hf_name)
    for cell in cells_of(source, hf_name):
        found = [(dst, box) for dst in needs if (box := cell.box.intersect(dst.box))]
        if not found:
            continue
        demands = tuple(
            RegionDemand(d.owner_ranks, b.num_elements, len(b.size) > 1) for d, b in found
        )
        # Only layers count as turns: some experts are needed where they are and are not sent.
        assignments = assign_sources(
            cell.owner_ranks, demands, ranks_per_node, rotation, num_layers, relay
        )
        for (dst, box), slices in zip(found, assignments, strict=True):
            for i, assigned in enumerate(slices):
                if (part := box.slice(i, len(slices))).num_elements:
                    yield cell, dst, part, assigned


def _transfer(
    piece: Piece, wanted: Piece, box: Box, src_rank: int, dst_rank: int, hop: int
) -> Transfer:
    return Transfer(
        src_rank,
        dst_rank,
        piece.hf_name,
        box,
        piece.param,
        box.moved(piece.hf_box, piece.param_box),
        piece.view,
        wanted.param,
        box.moved(wanted.hf_box, wanted.param_box),
        wanted.view,
        hop,
    )


@without_collection()
def plan_reshard(
    source: ShardLayout,
    target: ShardLayout,
    rank: int,
    ranks_per_node: int,
    *,
    relay: bool = False,
) -> ReshardPlan:
    """Make the plan of one rank. Local and pure: every rank may call it alone.

    Args:
        source: Layout that is read.
        target: Layout that is written; it has the source's HF tensors (:func:`check_same_tensors`).
        rank: Rank to plan for.
        ranks_per_node: Number of ranks per node; sources on the same node are preferred.
        relay: Send each rectangle to a node once and forward it there (two hops).
    """
    sends: list[Transfer] = []
    receives: list[Transfer] = []
    copies: list[Transfer] = []
    local_duplicates: list[Transfer] = []
    for name in sorted({*source.held_names(rank), *target.held_names(rank)}):
        for cell, dst, box, assigned in overlaps(source, target, name, ranks_per_node, relay):
            if needed := dst.is_held_by(rank):
                sender, hop = assigned.source_of(rank)
                piece = (dst if hop == 2 else cell).piece_of(sender)
                where = copies if sender == rank else receives
                wanted = dst.piece_of(rank)
                where.append(_transfer(piece, wanted, box, sender, rank, max(1, hop)))
            if needed or cell.is_held_by(rank):
                for receiver, hop in assigned.served_by(rank):
                    piece = (dst if hop == 2 else cell).piece_of(rank)
                    wanted = dst.piece_of(receiver)
                    sends.append(_transfer(piece, wanted, box, rank, receiver, hop))
        for again, once in local_duplicates_of(target, name).items():
            if rank in again.owner_ranks:
                box = once.piece.hf_box
                local_duplicates.append(_transfer(once.piece, again.piece, box, rank, rank, 1))
    digest = layout_digest(source, target, ranks_per_node, relay)
    return ReshardPlan(
        rank, tuple(sends), tuple(receives), tuple(copies), tuple(local_duplicates), digest
    )


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
