"""Layout-invariant checksums of HF tensors: the proof that both sides hold the same bits (R5).

The checksum of a tensor is the sum over its elements of (bit pattern x odd hash of the element's
global index) modulo 2^64. It does not depend on how the tensor is cut or ordered, so trainer and
engine compute it from their own pieces and compare one integer per tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
import torch.distributed as dist

from mindspeed_rl.resharding.boxes import Box
from mindspeed_rl.resharding.layouts.base import ShardLayout, pieces_of

_MULTIPLIER_1 = -4658895280553007687  # 0xbf58476d1ce4e5b9 of splitmix64, as a signed integer
_MULTIPLIER_2 = -7723592293110705685  # 0x94d049bb133111eb
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _index_hash(box: Box, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """splitmix64's mixer of the row-major global index of each element, made odd: [box.size]."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for dim, (lo, size) in enumerate(zip(box.lo, box.size, strict=True)):
        line = torch.arange(lo, lo + size, dtype=torch.int64, device=device)
        index = index.unsqueeze(-1) * shape[dim] + line
    value = index
    value = (value ^ ((value >> 30) & ((1 << 34) - 1))) * _MULTIPLIER_1
    value = (value ^ ((value >> 27) & ((1 << 37) - 1))) * _MULTIPLIER_2
    return (value ^ ((value >> 31) & ((1 << 33) - 1))) | 1


def box_checksum(values: torch.Tensor, box: Box, shape: tuple[int, ...]) -> torch.Tensor:
    """The share of one rectangle in its tensor's checksum.

    Args:
        values: [box.size], any floating type.
        box: its place in the HF tensor.
        shape: of the whole HF tensor.

    Returns:
        0-d int64 (modulo 2^64).
    """
    bits = values.contiguous().view(_BITS[values.element_size()]).to(torch.int64)
    return (bits * _index_hash(box, shape, values.device)).sum()


def local_checksums(
    layout: ShardLayout,
    rank: int,
    params: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    *,
    primary_only: bool,
) -> torch.Tensor:
    """This rank's share in the checksum of every HF tensor of ``layout``. Local.

    Args:
        layout: where the rank keeps what.
        rank: global rank.
        params: its parameters by local name.
        dtype: values are cast to it first, as on the wire.
        primary_only: count each element on one rank only, so that the sum over all ranks is the
            checksum; else every copy counts, and the sum is the checksum times the copies.

    Returns:
        [number of HF tensors] int64, in the order of ``layout.hf_shapes``.
    """
    order = {name: i for i, name in enumerate(layout.hf_shapes)}
    sums = torch.zeros(len(order), dtype=torch.int64)
    for shard in pieces_of(layout, rank):
        if primary_only and (shard.mirror or shard.holders[0] != rank):
            continue
        piece = shard.piece
        values = params[piece.param].detach()[piece.param_box.slices].to(dtype)
        shape = layout.hf_shapes[piece.hf_name]
        sums[order[piece.hf_name]] += box_checksum(values, piece.hf_box, shape).cpu()
    return sums


def copies_held(layout: ShardLayout) -> torch.Tensor:
    """How many ranks hold each element of each HF tensor: [number of HF tensors] int64."""
    copies = []
    for name, shape in layout.hf_shapes.items():
        held = sum(s.piece.hf_box.num_elements * len(s.holders) for s in layout.shards(name))
        copies.append(held // prod(shape))
    return torch.tensor(copies, dtype=torch.int64)


def differing_tensors(
    source: ShardLayout,
    target: ShardLayout,
    rank: int,
    read: Mapping[str, torch.Tensor],
    write: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    group: dist.ProcessGroup | None = None,
) -> list[str]:
    """HF tensors whose bits differ between the two sides on any rank. Collective: the world.

    Two int64 per tensor travel.
    """
    names = list(source.hf_shapes)
    sums = torch.stack(
        [
            local_checksums(source, rank, read, dtype, primary_only=True),
            local_checksums(target, rank, write, dtype, primary_only=False)[
                [list(target.hf_shapes).index(name) for name in names]
            ],
        ]
    )
    dist.all_reduce(sums, group=group)
    copies = copies_held(target)[[list(target.hf_shapes).index(name) for name in names]]
    differs = (sums[0] * copies) != sums[1]
    return [name for name, wrong in zip(names, differs.tolist(), strict=True) if wrong]
