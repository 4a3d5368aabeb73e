"""Checks of the process groups of the training layout, which megatron-core builds."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.layout import Coords, ExpertCoords, ParallelLayout
from mindspeed_rl.parallel.small_collectives import gather_objects


def rank_lists(layout: ParallelLayout) -> dict[str, list[list[int]]]:
    """The ranks of every group of every axis of both grids, as megatron-core forms them."""
    result = {}
    for axis in ("tp", "cp", "dp", "pp"):
        result[axis] = _groups(layout.world, layout.coords, axis)
    for axis, name in (("tp", "etp"), ("ep", "ep"), ("dp", "edp")):
        result[name] = _groups(layout.world, layout.expert_coords, axis)
    return result


def _groups(
    world: int, coords_of: Callable[[int], Coords | ExpertCoords], axis: str
) -> list[list[int]]:
    """Groups of ranks that differ along one axis only."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(world):
        coords = coords_of(rank)
        others = tuple(getattr(coords, name) for name in coords.__slots__ if name != axis)
        groups.setdefault(others, []).append(rank)
    return list(groups.values())


def check_equal_nodes(local_size: int) -> None:
    """Check that all nodes run equally many ranks, as plans assume. Collective: the world.

    Args:
        local_size: Number of ranks on this rank's node.

    Raises:
        UsageError: Nodes differ; raised on all ranks, with the sizes.
    """
    found = gather_objects(local_size)
    if len(set(found)) > 1:
        per_rank = ", ".join(
            f"{found.count(size)} ranks on nodes of {size}" for size in sorted(set(found))
        )
        raise UsageError(
            f"nodes run different numbers of ranks ({per_rank}): which ranks share a node decides "
            "who sends weights to whom; give torchrun the same --nproc-per-node on every node"
        )


def check_group(layout: ParallelLayout, axis: str, group: dist.ProcessGroup) -> None:
    """Compare the ranks of a real group with the layout, which plans are computed from.

    Raises:
        RuntimeError: They differ, so every plan would be wrong.
    """
    mine = sorted(dist.get_process_group_ranks(group))
    rank = dist.get_rank()
    expected = next(ranks for ranks in rank_lists(layout)[axis] if rank in ranks)
    if mine != sorted(expected):
        raise RuntimeError(f"{axis} group of rank {rank} is {mine}, the layout says {expected}")
