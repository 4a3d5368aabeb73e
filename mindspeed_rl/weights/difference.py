"""Search for the first element of a tensor in which the two sides of a weight sync differ.

It is used after a checksum failed. It shares no code with the planner: owner ranks of the source
broadcast what they hold, and every rank compares its own copy of the target with that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mindspeed_rl.core.boxes import Box
from mindspeed_rl.weights.executor import wire_dtype
from mindspeed_rl.weights.layouts.base import Shard, ShardLayout

_SLICE_ELEMENTS = 1 << 24
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


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


def first_difference(
    source: ShardLayout,
    target: ShardLayout,
    hf_name: str,
    rank: int,
    read: Mapping[str, torch.Tensor],
    write: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> Difference | None:
    """Find the first element of a tensor that differs on any rank. Collective: the world.

    Args:
        source: Layout of ``read``; where several ranks own a rectangle, the first one is the
            reference.
        target: Layout of ``write``.
        hf_name: Name of the tensor.
        rank: Global rank.
        read: Source parameters of this rank.
        write: Target parameters of this rank.
        dtype: Element type on the wire of tensors that declare none.
        device: Device of the broadcast buffers.
    """
    dtype = wire_dtype(source.dtype_of(hf_name), dtype)
    mine = [shard for shard in target.shards(hf_name) if rank in shard.owner_ranks]
    first: Difference | None = None
    for shard in source.shards(hf_name):
        if shard.is_replica:
            continue
        whole = shard.piece.hf_box
        parts = -(-whole.num_elements // _SLICE_ELEMENTS)
        for box in (whole.slice(i, parts) for i in range(parts)):
            values = torch.empty(box.size, dtype=dtype, device=device)
            if shard.owner_ranks[0] == rank:
                values.copy_(_values(shard, box, read))
            dist.broadcast(values, shard.owner_ranks[0])
            for held in mine:
                found = _compare(held, box, values, write, rank)
                first = min((d for d in (first, found) if d is not None), default=None)
    everyone: list[Difference | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, first)
    return min((d for d in everyone if d is not None), default=None)


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
