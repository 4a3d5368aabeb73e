"""Rounds of a reshard: which tensors travel together, under a byte budget.

The assignment is a pure function of the two layouts, so all ranks agree without talking. Every
round takes tensors of every pipeline stage in turn, so that the ranks of all stages send at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from mindspeed_rl.resharding.layouts.base import ShardLayout


def _largest_message(layout: ShardLayout, other: ShardLayout, name: str, item_bytes: int) -> int:
    """Upper bound of what one rank sends plus receives for a tensor."""
    receives = sends = 0
    for shard in other.shards(name):
        receives = max(receives, shard.piece.hf_box.num_elements)
    for shard in layout.shards(name):
        if shard.mirror:
            continue
        served = sum(
            box.num_elements * ceil(len(dst.holders) / len(shard.holders))
            for dst in other.shards(name)
            if (box := shard.piece.hf_box.intersect(dst.piece.hf_box))
        )
        sends = max(sends, served)
    return (receives + sends) * item_bytes


def plan_rounds(
    source: ShardLayout, target: ShardLayout, bucket_bytes: int, item_bytes: int
) -> tuple[tuple[str, ...], ...]:
    """HF tensor names of each round, the same on every rank.

    Args:
        source: the sending layout.
        target: the receiving layout.
        bucket_bytes: bound of send plus receive staging of one round on one rank. A single tensor
            whose shards exceed it makes a round of its own.
        item_bytes: bytes of one element on the wire.
    """
    if bucket_bytes < 1:
        raise ValueError(f"--reshard-bucket-mb gives {bucket_bytes} bytes; must be positive")
    rounds: list[tuple[str, ...]] = []
    current: list[str] = []
    used = 0
    for name in _interleave_stages(source):
        cost = _largest_message(source, target, name, item_bytes)
        if current and used + cost > bucket_bytes:
            rounds.append(tuple(current))
            current, used = [], 0
        current.append(name)
        used += cost
    if current:
        rounds.append(tuple(current))
    return tuple(rounds)


def _interleave_stages(source: ShardLayout) -> Sequence[str]:
    """Tensor names ordered so that the holders of neighbours differ: one of each stage in turn."""
    by_holder: dict[int, list[str]] = {}
    for name in source.hf_shapes:
        first = next(shard for shard in source.shards(name) if not shard.mirror)
        by_holder.setdefault(first.holders.start, []).append(name)
    queues = list(by_holder.values())
    longest = max(len(queue) for queue in queues)
    return [queue[i] for i in range(longest) for queue in queues if i < len(queue)]
