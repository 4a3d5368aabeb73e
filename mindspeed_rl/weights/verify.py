"""Proof that both sides of a weight sync hold the same bits, and the search for what differs.

Trainer and engine compute a checksum from their own pieces that does not depend on the cut
(:mod:`~mindspeed_rl.proof.checksums`), and compare two integers per tensor. A proof is full, or
of a sample: vectors and every 32nd row of each matrix.

After a checksum failed, the first wrong element is looked for. That shares no code with the
planner: owner ranks of the source broadcast what they hold, and every rank compares its own copy of
the target with that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import cast
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist

from mindspeed_rl.core.boxes import Box
from mindspeed_rl.parallel.small_collectives import all_reduce_sum, gather_objects
from mindspeed_rl.proof.checksums import (
    ALL_ROWS,
    RowSample,
    check_arithmetic,
    fold_rows,
    splitmix64,
    sum_rows,
)
from mindspeed_rl.weight_layouts.base import Piece, Shard, ShardLayout, expert_name
from mindspeed_rl.weights.executor import wire_dtype

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SLICE_ELEMENTS = 1 << 24  # Elements broadcast at a time in the search for a difference.

# A sample has one row of this many, fewer than a head or an expert has, so that every sample has
# rows of one in the wrong place.
SAMPLED_ROWS = 32


@lru_cache(maxsize=1 << 12)
def sampled_rows(kind: str, sample: int) -> RowSample:
    """Return the rows that a sample has of all tensors of one kind and layer. Local.

    Which row the sample 0 begins with follows from the name, the same in every run. Consecutive
    samples have consecutive rows: each row is in one of any :data:`SAMPLED_ROWS`.

    Args:
        kind: Name of an HF tensor, with ``{e}`` for the expert.
        sample: Number of the sample, equal on all ranks.
    """
    start = int(splitmix64(np.array([crc32(kind.encode())], dtype=np.uint64))[0])
    return RowSample((start + sample) % SAMPLED_ROWS, SAMPLED_ROWS)


@dataclass(frozen=True, slots=True)
class _HeldPiece:
    """A rectangle of this rank, or that of all experts of a run that lie in one parameter.

    Attributes:
        piece: The rectangle; of a run that of its first expert.
        kind: Name of the HF tensors, with ``{e}`` for the expert.
        tensors: Their rows in the table of HF tensors.
        shape: Shape of a whole HF tensor.
        dtype: Type of its elements on the wire.
    """

    piece: Piece
    kind: str
    tensors: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def shown(self, params: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the values as a view: a rectangle, of several experts stacked in the first dim."""
        piece, param = self.piece, params[self.piece.param].detach()
        slices, count = piece.param_box.slices, len(self.tensors)
        if count == 1:
            return cast(torch.Tensor, piece.view.of(param)[slices])
        return cast(torch.Tensor, piece.view.of_run(param, count)[:, *slices])


def _held_pieces(
    layout: ShardLayout,
    rank: int,
    table: Mapping[str, int],
    default: torch.dtype,
    *,
    primary_only: bool,
) -> tuple[_HeldPiece, ...]:
    """Return the rectangles that a rank holds, run by run. O(what the rank holds)."""
    found: list[_HeldPiece] = []
    for kind, run in layout.held_runs(rank):
        names = [expert_name(kind, expert) for expert in run]
        tensors = tuple(table[name] for name in names)
        shape = layout.shape_of(names[0])
        dtype = wire_dtype(layout.dtype_of(names[0]), default)
        for shard in layout.shards(names[0]):
            if rank not in shard.owner_ranks:
                continue
            if primary_only and (shard.is_replica or shard.owner_ranks[0] != rank):
                continue
            if shard.piece.view.index:  # All lie in one parameter.
                found.append(_HeldPiece(shard.piece, kind, tensors, shape, dtype))
                continue
            for name, tensor in zip(names, tensors, strict=True):
                param = layout.param_like(shard.piece, name)
                piece = replace(shard.piece, hf_name=name, param=param)
                found.append(_HeldPiece(piece, kind, (tensor,), shape, dtype))
    return tuple(found)


def _sum_pieces(
    pieces: Sequence[_HeldPiece],
    params: Mapping[str, torch.Tensor],
    num_tensors: int,
    sample: int | None,
) -> torch.Tensor:
    """Return what pieces add to the checksums of the HF tensors: [num_tensors, 2] int32. Local."""
    by_device: dict[torch.device, list[tuple[_HeldPiece, RowSample, int]]] = {}
    for held in pieces:
        rows = ALL_ROWS if sample is None else sampled_rows(held.kind, sample)
        if count := rows.count(held.piece.hf_box):
            device = params[held.piece.param].device
            by_device.setdefault(device, []).append((held, rows, count * len(held.tensors)))
    total = np.zeros((num_tensors, 2), dtype=np.uint32)
    for device, several in by_device.items():
        check_arithmetic(device)
        counts = [count for *_, count in several]
        # One tensor for the sums of all rows, so that each device needs one copy to the host.
        sums = torch.empty(sum(counts), dtype=torch.int32, device=device)
        for (held, rows, _), out in zip(several, torch.split(sums, counts), strict=True):
            sum_rows(held.shown(params), held.piece.hf_box, held.dtype, out, rows)
        on_host, first = sums.cpu().numpy().view(np.uint32), 0
        for held, rows, count in several:
            of_tensors = on_host[first : first + count].reshape(len(held.tensors), -1)
            total[[*held.tensors]] += fold_rows(of_tensors, held.piece.hf_box, held.shape, rows)
            first += count
    return torch.from_numpy(total.view(np.int32))


def copies_held(layout: ShardLayout, names: Sequence[str]) -> torch.Tensor:
    """Count the ranks that hold each element of some HF tensors: [n] int32."""
    of_places: dict[Hashable, int] = {}
    copies = []
    for name in names:
        place = layout.placement_key(name), layout.run_of(name).start
        if place not in of_places:
            shards = layout.shards(name)
            held = sum(s.piece.hf_box.num_elements * len(s.owner_ranks) for s in shards)
            of_places[place] = held // prod(layout.shape_of(name))
        copies.append(of_places[place])
    return torch.tensor(copies, dtype=torch.int32)


def source_sums(
    layout: ShardLayout, rank: int, params: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, tuple[int, int]]:
    """Return the checksum of every HF tensor of a model. Collective: the world.

    A checksum is two signed integers of 32 bits; see :mod:`~mindspeed_rl.proof.checksums`.
    """
    table = {name: i for i, name in enumerate(layout.hf_shapes)}
    held = _held_pieces(layout, rank, table, dtype, primary_only=True)
    sums = all_reduce_sum(_sum_pieces(held, params, len(table), None), None)
    return {name: (one, two) for name, (one, two) in zip(table, sums.tolist(), strict=True)}


def source_digest(
    layout: ShardLayout, rank: int, params: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> str:
    """Return a name of the bits of a model that does not depend on its layout.

    Collective: the world. It is the SHA-256 of the names and checksums of all HF tensors.
    """
    sums = source_sums(layout, rank, params, dtype)
    text = "".join(f"{name} {list(sums[name])}\n" for name in sorted(sums))
    return hashlib.sha256(text.encode()).hexdigest()


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
        table = {name: i for i, name in enumerate(self._names)}
        self._source = _held_pieces(source, rank, table, dtype, primary_only=True)
        self._target = _held_pieces(target, rank, table, dtype, primary_only=False)
        self._copies = copies_held(target, self._names)
        self._dtype = dtype

    def checksums(
        self,
        read: Mapping[str, torch.Tensor],
        write: Mapping[str, torch.Tensor],
        sample: int | None = None,
    ) -> torch.Tensor:
        """Compute what this rank adds to the checksums of both sides. Local.

        Args:
            read: Parameters of the trainer.
            write: Parameters of the engine.
            sample: Number of the sample of rows; ``None``: all rows.

        Returns:
            [2 sides, number of HF tensors, 2] int32, in the order of ``source.hf_shapes``.
        """
        sides = ((self._source, read), (self._target, write))
        return torch.stack([_sum_pieces(*side, len(self._names), sample) for side in sides])

    def differing_tensors(
        self,
        read: Mapping[str, torch.Tensor],
        write: Mapping[str, torch.Tensor],
        group: dist.ProcessGroup | None = None,
        sample: int | None = None,
    ) -> list[str]:
        """Find the HF tensors whose bits differ between the two sides. Collective: the world.

        Every rank gets the same list. 16 bytes per tensor go to every rank.

        Args:
            read: Parameters of the trainer.
            write: Parameters of the engine.
            group: Process group of all ranks; ``None``: the world.
            sample: Number of the sample of rows, equal on all ranks; ``None``: all rows.
        """
        sums = all_reduce_sum(self.checksums(read, write, sample), group)
        differs = (sums[0] * self._copies[:, None] != sums[1]).any(1)
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
