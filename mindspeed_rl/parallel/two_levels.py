"""Collectives of large worlds in two levels: in groups of neighbouring ranks, then between leaders.

Sent directly, a gather takes a message from every rank to every other one: 16.8 million messages
among 4,096 ranks, 4,095 from each. In two levels the first rank of each group collects the rows of
its group, exchanges them with the other first ranks, and hands the whole table on: 12,096 messages,
at most 126 from a rank. The result is the same table.

A sum goes the same way. The first rank of each group adds up what its group has, the first ranks
add up a part each and exchange these parts, and each hands the whole sum on: 16,128 messages among
4,096 ranks, at most 189 from a rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

FROM_RANKS = 1000
"""Worlds of more ranks than this gather and sum small tensors in two levels."""

GROUP_RANKS = 64
"""Most ranks of a group of the lower level."""


@dataclass(frozen=True, slots=True)
class TableMove:
    """Rows of the table that travel between this rank and a peer."""

    peer: int
    rows: range


@dataclass(frozen=True, slots=True)
class GatherStep:
    """What one rank sends and receives before the next step."""

    sends: tuple[TableMove, ...] = ()
    receives: tuple[TableMove, ...] = ()


def steps_of(rank: int, world: int, group_ranks: int) -> tuple[GatherStep, GatherStep, GatherStep]:
    """Return the three steps of a rank: to its leader, between leaders, from its leader. Pure.

    Args:
        rank: Rank in the process group.
        world: Number of ranks of the process group.
        group_ranks: Most ranks of a group of the lower level.
    """
    leaders = range(0, world, group_ranks)
    leader = rank - rank % group_ranks
    everything = range(world)

    def rows_of(first: int) -> range:
        return range(first, min(world, first + group_ranks))

    if rank != leader:
        own = GatherStep(sends=(TableMove(leader, range(rank, rank + 1)),))
        return own, GatherStep(), GatherStep(receives=(TableMove(leader, everything),))
    members = rows_of(leader)[1:]
    collect = GatherStep(receives=tuple(TableMove(peer, range(peer, peer + 1)) for peer in members))
    others = [peer for peer in leaders if peer != leader]
    exchange = GatherStep(
        tuple(TableMove(peer, rows_of(leader)) for peer in others),
        tuple(TableMove(peer, rows_of(peer)) for peer in others),
    )
    return (
        collect,
        exchange,
        GatherStep(sends=tuple(TableMove(peer, everything) for peer in members)),
    )


def gather_in_two_levels(
    values: torch.Tensor, group: dist.ProcessGroup | None, group_ranks: int
) -> torch.Tensor:
    """Gather the tensors of a group as [ranks, *shape], in rank order. Collective: the group.

    Args:
        values: Tensor on the host, of one shape and dtype on all ranks.
        group: Process group; ``None``: the world.
        group_ranks: Most ranks of a group of the lower level.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    table = values.new_empty((world, *values.shape))
    table[rank] = values
    for step in steps_of(rank, world, group_ranks):
        _exchange(
            {move.peer: _rows(table, move.rows) for move in step.sends},
            {move.peer: _rows(table, move.rows) for move in step.receives},
            group,
        )
    return table


def sum_in_two_levels(
    values: torch.Tensor, group: dist.ProcessGroup | None, group_ranks: int
) -> torch.Tensor:
    """Sum the tensors of all ranks of a group. Collective: the group.

    Args:
        values: Integers on the host, of one shape and dtype on all ranks; they are not changed.
        group: Process group; ``None``: the world.
        group_ranks: Most ranks of a group of the lower level.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    leader = rank - rank % group_ranks
    total = values.flatten().clone()
    if rank != leader:
        _exchange({leader: total}, {}, group)
        _exchange({}, {leader: total}, group)
        return total.view(values.shape)
    members = range(rank + 1, min(world, rank + group_ranks))
    _add(total, {}, members, group)
    leaders = range(0, world, group_ranks)
    parts = dict(zip(leaders, total.tensor_split(len(leaders)), strict=True))
    others = {peer: part for peer, part in parts.items() if peer != rank}
    _add(parts[rank], others, others, group)
    _exchange(dict.fromkeys(others, parts[rank]), others, group)
    _exchange(dict.fromkeys(members, total), {}, group)
    return total.view(values.shape)


def _add(
    mine: torch.Tensor,
    sends: Mapping[int, torch.Tensor],
    peers: Iterable[int],
    group: dist.ProcessGroup | None,
) -> None:
    """Add what peers send, tensors of the shape of ``mine``, while sending them others."""
    received = {peer: torch.empty_like(mine) for peer in peers}
    _exchange(sends, received, group)
    for other in received.values():
        mine += other


def _exchange(
    sends: Mapping[int, torch.Tensor],
    receives: Mapping[int, torch.Tensor],
    group: dist.ProcessGroup | None,
) -> None:
    """Send a tensor to some ranks of a group and receive one from some; empty ones do not travel.

    Both mappings are by rank in the group.
    """
    operations = [
        dist.P2POp(kind, tensor, _global(peer, group), group)
        for kind, tensors in ((dist.irecv, receives), (dist.isend, sends))
        for peer, tensor in tensors.items()
        if tensor.numel()
    ]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()


def _rows(table: torch.Tensor, rows: range) -> torch.Tensor:
    return table[rows.start : rows.stop]


def _global(rank: int, group: dist.ProcessGroup | None) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)
