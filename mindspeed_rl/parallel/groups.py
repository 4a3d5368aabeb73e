"""Process groups of the training layout: built once, by megatron-core."""

from __future__ import annotations

import torch.distributed as dist

from mindspeed_rl.parallel.layout import ParallelLayout


def rank_lists(layout: ParallelLayout) -> dict[str, list[list[int]]]:
    """The ranks of every tensor, pipeline and data-parallel group, as megatron-core forms them."""
    ranks = range(layout.world)
    result = {}
    for axis, others in (("tp", "cp dp pp"), ("pp", "tp cp dp"), ("dp", "tp cp pp")):
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in ranks:
            coords = layout.coords(rank)
            key = tuple(int(getattr(coords, other)) for other in others.split())
            groups.setdefault(key, []).append(rank)
        result[axis] = list(groups.values())
    return result


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
