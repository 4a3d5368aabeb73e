"""Process groups of the training layout: built once, by megatron-core."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from mindspeed_rl.parallel.layout import Coords, ExpertCoords, ParallelLayout


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
    """Ranks that differ along one axis only."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(world):
        coords = coords_of(rank)
        others = tuple(getattr(coords, name) for name in coords.__slots__ if name != axis)
        groups.setdefault(others, []).append(rank)
    return list(groups.values())


def check_group(layout: ParallelLayout, axis: str, group: dist.ProcessGroup) -> None:
    """Compare a real group with the layout; the layout is what plans are computed from.

    Raises:
        RuntimeError: they differ, so every plan would be wrong.
    """
    mine = sorted(dist.get_process_group_ranks(group))
    rank = dist.get_rank()
    expected = next(ranks for ranks in rank_lists(layout)[axis] if rank in ranks)
    if mine != sorted(expected):
        raise RuntimeError(f"{axis} group of rank {rank} is {mine}, the layout says {expected}")
