"""Which ranks write what the whole job makes once, on file systems that nodes may not share."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist


def export_writers(target: Path, rank: int, world: int, ranks_per_node: int) -> range:
    """Rank 0 where all nodes see its directory, else the first rank of every node.

    Collective: the world.

    Args:
        target: the directory to be written, as this rank names it.
        rank: global rank.
        world: number of ranks.
        ranks_per_node: of every node.
    """
    token = [os.urandom(8).hex()]
    dist.broadcast_object_list(token, 0)
    marker = target.parent / f".{target.name}.{token[0]}"
    if rank == 0:
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    dist.barrier()
    seen: list[bool] = [True] * world
    dist.all_gather_object(seen, marker.exists())
    if rank == 0:
        marker.unlink()
    return range(0, world, world if all(seen) else ranks_per_node)
