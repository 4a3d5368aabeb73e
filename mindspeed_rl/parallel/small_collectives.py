"""Sums and gathers of small tensors, in one or two messages from rank to rank, and of objects.

The collectives of gloo pass a tensor around a ring: their time is the number of ranks times that of
a message, however small the tensor is. Small tensors are sent directly to all ranks instead, and in
large worlds in two levels (:mod:`~mindspeed_rl.parallel.two_levels`).
"""

from __future__ import annotations

import pickle
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from mindspeed_rl.parallel import two_levels

T = TypeVar("T")

# A tensor is sent whole to every rank where all its copies have at most this many bytes. A larger
# sum sends one part per rank, twice; a larger gather takes the ring, which needs no copies.
DIRECT_BYTES = 2**20


def all_reduce_sum(values: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sum the tensors of all ranks of a group. Collective: the group.

    Args:
        values: Integers, whose sum does not depend on the order; of one shape on all ranks.
        group: Process group; ``None``: the world.

    Returns:
        The sum, of the shape and dtype of ``values``, which are not changed.

    Raises:
        AssertionError: The tensor has floating-point numbers.
    """
    assert not values.is_floating_point(), "the sum of floats depends on the order of ranks"
    if values.device.type != "cpu":
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total
    world = dist.get_world_size(group)
    if world > two_levels.FROM_RANKS:
        return two_levels.sum_in_two_levels(values, group, two_levels.GROUP_RANKS)
    if world * values.nbytes <= DIRECT_BYTES:
        return gather_rows(values, group).sum(0, dtype=values.dtype)
    share = -(-values.numel() // world)
    padded = values.new_zeros(world * share)
    padded[: values.numel()] = values.flatten()
    mine = _exchanged(padded.view(world, share), group).sum(0, dtype=values.dtype)
    return _from_all(mine, group).flatten()[: values.numel()].view(values.shape)


def gather_rows(values: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Gather the tensors of a group as [ranks, *shape], in rank order. Collective: the group.

    Args:
        values: Tensor of one shape and dtype on all ranks.
        group: Process group; ``None``: the world.
    """
    world = dist.get_world_size(group)
    if values.device.type == "cpu" and world * values.nbytes <= DIRECT_BYTES:
        if world > two_levels.FROM_RANKS:
            return two_levels.gather_in_two_levels(values, group, two_levels.GROUP_RANKS)
        return _from_all(values, group)
    rows = [torch.empty_like(values) for _ in range(world)]
    dist.all_gather(rows, values, group=group)
    return torch.stack(rows)


def gather_objects(mine: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Gather one object of each rank of a group, in rank order. Collective: the group."""
    world = dist.get_world_size(group)
    if world > two_levels.FROM_RANKS:
        text = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
        sizes: list[int] = gather_rows(torch.tensor([text.numel()]), group).flatten().tolist()
        padded = text.new_zeros(max(sizes))
        padded[: text.numel()] = text
        rows = gather_rows(padded, group).numpy()
        return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]
    found: list[T | None] = [None] * world
    dist.all_gather_object(found, mine, group)
    return cast(list[T], found)


def _from_all(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Gather the tensors as [ranks, *shape] by sending a copy of one's own to every rank."""
    world = dist.get_world_size(group)
    return _exchanged(values.expand(world, *values.shape).contiguous(), group)


def _exchanged(rows: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Send row r to rank r; return the rows of all ranks in their order."""
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows, group=group)
    return received
