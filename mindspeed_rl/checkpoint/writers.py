"""Which ranks write an export: one, or one of each node."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

from mindspeed_rl.parallel.small_collectives import gather_objects


def export_writers(target: Path, rank: int, world: int, ranks_per_node: int) -> range:
    """Return the ranks that write an export. Collective: the world.

    This is rank 0 if all nodes see its directory, else the first rank of every node.

    Args:
        target: Directory to be written, as this rank names it.
        rank: Global rank.
        world: Number of ranks.
        ranks_per_node: Number of ranks on every node.
    """
    token = [os.urandom(8).hex()]
    dist.broadcast_object_list(token, 0)
    marker = target.parent / f".{target.name}.{token[0]}"
    if rank == 0:
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    dist.barrier()
    seen = gather_objects(marker.exists())
    if rank == 0:
        marker.unlink()
    return range(0, world, world if all(seen) else ranks_per_node)
