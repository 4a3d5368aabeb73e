"""Proof that both sides of a weight sync hold the same bits, and the search for what differs.

Trainer and engine compute a checksum from their own pieces that does not depend on the cut
(:mod:`~mindspeed_rl.weights.checksums`), and compare one integer per tensor.

After a checksum failed, the first wrong element is looked for. That shares no code with the
planner: owner ranks of the source broadcast what they hold, and every rank compares its own copy of
the target with that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist

from mindspeed_rl.core.boxes import Box
from mindspeed_rl.parallel.small_collectives import all_reduce_sum, gather_objects
from mindspeed_rl.weights.checksums import box_checksum, check_arithmetic
from mindspeed_rl.weights.executor import wire_dtype
from mindspeed_rl.weights.layouts.base import Piece, Shard, ShardLayout, pieces_of

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SLICE_ELEMENTS = 1 << 24  # Elements broadcast at a time in the search for a difference.


@dataclass(frozen=True, slots=True)
class _HeldPiece:
    """A rectangle of this rank and its row in the table of HF tensors."""

    piece: Piece
    row: int
    dtype: str


def _held_pieces(
    layout: ShardLayout, rank: int, rows: Mapping[str, int], *, primary_only: bool
) -> tuple[_HeldPiece, ...]:
    return tuple(
        _HeldPiece(
            shard.piece,
            rows[shard.piece.hf_name],
            layout.dtype_of(shard.piece.hf_name),
        )
        for shard in pieces_of(layout, rank)
        if not primary_only or (not shard.is_replica and shard.owner_ranks[0] == rank)
    )


def _sum_pieces(
    pieces: Sequence[_HeldPiece], params: Mapping[str, torch.Tensor], dtype: torch.dtype, count: int
) -> torch.Tensor:
    found: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for held in pieces:
        piece = held.piece
        shown = piece.view.of(params[piece.param].detach())[piece.param_box.slices]
        wire = wire_dtype(held.dtype, dtype)
        value = box_checksum(shown, piece.hf_box, wire)
        found.setdefault(value.device, []).append((held.row, value))
    total = torch.zeros(count, dtype=torch.int64)
    for device, pairs in found.items():
        check_arithmetic(device)
        rows, values = zip(*pairs, strict=True)
        # The values of a device are stacked first, so that each device needs one copy to the host.
        total.index_add_(0, torch.tensor(rows), torch.stack(values).cpu())
    return total


def copies_held(layout: ShardLayout, names: Sequence[str]) -> torch.Tensor:
    """Count the ranks that hold each element of some HF tensors: [n] int64."""
    copies = []
    for name in names:
        held = sum(s.piece.hf_box.num_elements * len(s.owner_ranks) for s in layout.shards(name))
        copies.append(held // prod(layout.hf_shapes[name]))
    return torch.tensor(copies, dtype=torch.int64)


# --- the first difference ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class Difference:
    """The first element of an HF tensor, in row-major order, that is wrong on a rank."""

    index: tuple[int, ...]
    rank: int
    hf_name: str
    param: str
    expected: float
    found: float

    def __str__(self) -> str:
        where = ", ".join(map(str, self.index))
        return (
            f"{self.hf_name}[{where}] on rank {self.rank} ({self.param}): "
            f"{self.found!r} instead of {self.expected!r}"
        )


def _values(shard: Shard, box: Box, params: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a rectangle of the HF tensor as a view of the parameter that holds it."""
    piece = shard.piece
    shown: torch.Tensor = piece.view.of(params[piece.param].detach())
    return shown[box.moved(piece.hf_box, piece.param_box).slices]


def _compare(
    held: Shard, box: Box, values: torch.Tensor, write: Mapping[str, torch.Tensor], rank: int
) -> Difference | None:
    both = box.intersect(held.piece.hf_box)
    if both is None:
        return None
    expected = values[both.moved(box, Box.whole(box.size)).slices]
    found = _values(held, both, write).to(values.dtype)
    bits = _BITS[values.element_size()]
    wrong = (expected.contiguous().view(bits) != found.contiguous().view(bits)).nonzero()
    if not len(wrong):
        return None
    local = tuple(wrong[0].tolist())
    index = tuple(lo + i for lo, i in zip(both.lo, local, strict=True))
    piece = held.piece
    return Difference(
        index, rank, piece.hf_name, piece.param, float(expected[local]), float(found[local])
    )


# --- both together -----------------------------------------------------------------------------


class WeightVerifier:
    """Compares the bits of two layouts after each sync; what is constant is computed only once.

    Args:
        source: Layout that was read; each element counts once.
        target: Layout that was written; every copy counts.
        rank: Global rank.
        dtype: Element type on the wire.
    """

    def __init__(
        self, source: ShardLayout, target: ShardLayout, rank: int, dtype: torch.dtype
    ) -> None:
        self._layouts, self._rank = (source, target), rank
        self._names = list(source.hf_shapes)
        rows = {name: i for i, name in enumerate(self._names)}
        self._source = _held_pieces(source, rank, rows, primary_only=True)
        self._target = _held_pieces(target, rank, rows, primary_only=False)
        self._copies = copies_held(target, self._names)
        self._dtype = dtype

    def checksums(
        self, read: Mapping[str, torch.Tensor], write: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Compute what this rank adds to the checksums of both sides. Local.

        Returns:
            [2, number of HF tensors] int64, in the order of ``source.hf_shapes``.
        """
        sides = ((self._source, read), (self._target, write))
        count = len(self._names)
        return torch.stack([_sum_pieces(*side, self._dtype, count) for side in sides])

    def differing_tensors(
        self,
        read: Mapping[str, torch.Tensor],
        write: Mapping[str, torch.Tensor],
        group: dist.ProcessGroup | None = None,
    ) -> list[str]:
        """Find the HF tensors whose bits differ between the two sides. Collective: the world.

        Every rank gets the same list. Two int64 per tensor go to every rank.
        """
        sums = all_reduce_sum(self.checksums(read, write), group)
        differs = (sums[0] * self._copies) != sums[1]
        return [name for name, wrong in zip(self._names, differs.tolist(), strict=True) if wrong]

    def first_difference(
        self,
        hf_name: str,
        read: Mapping[str, torch.Tensor],
        write: Mapping[str, torch.Tensor],
    ) -> Difference | None:
        """Locate the first element of a tensor that differs on any rank. Collective: the world.

        Where several ranks own a rectangle of the source, the first one is the reference.
        """
        source, target = self._layouts
        device = next(iter((*write.values(), *read.values()))).device
        dtype = wire_dtype(source.dtype_of(hf_name), self._dtype)
        mine = [shard for shard in target.shards(hf_name) if self._rank in shard.owner_ranks]
        found: list[Difference | None] = []
        for shard in source.shards(hf_name):
            if shard.is_replica:
                continue
            whole = shard.piece.hf_box
            parts = -(-whole.num_elements // _SLICE_ELEMENTS)
            for box in (whole.slice(i, parts) for i in range(parts)):
                values = torch.empty(box.size, dtype=dtype, device=device)
                if shard.owner_ranks[0] == self._rank:
                    values.copy_(_values(shard, box, read))
                dist.broadcast(values, shard.owner_ranks[0])
                found += (_compare(held, box, values, write, self._rank) for held in mine)
        first = min((d for d in found if d is not None), default=None)
        return min((d for d in gather_objects(first) if d is not None), default=None)
