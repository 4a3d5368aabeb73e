"""Gathers of large worlds in two levels: within groups of neighbouring ranks, then between leaders.

Sent directly, a gather takes a message from every rank to every other one: 16.8 million messages
among 4,096 ranks, 4,095 from each. In two levels the first rank of each group collects the rows of
its group, exchanges them with the other first ranks, and hands the whole table on: 12,096 messages,
at most 126 from a rank. The result is the same table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

FROM_RANKS = 1000
"""Worlds of more ranks than this gather small tensors in two levels."""

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
        operations = [
            dist.P2POp(kind, _rows(table, move.rows), _global(move.peer, group), group)
            for kind, moves in ((dist.irecv, step.receives), (dist.isend, step.sends))
            for move in moves
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
    return table


def _rows(table: torch.Tensor, rows: range) -> torch.Tensor:
    return table[rows.start : rows.stop]


def _global(rank: int, group: dist.ProcessGroup | None) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)
