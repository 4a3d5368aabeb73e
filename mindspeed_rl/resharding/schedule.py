"""Rounds of a reshard: which tensors travel together, under a byte budget.

The assignment is a pure function of the two layouts, so all ranks agree without talking. Every
round takes tensors of every pipeline stage in turn, so that the ranks of all stages send at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from mindspeed_rl.resharding.layouts.base import ShardLayout
from mindspeed_rl.resharding.planner import choose_source

_ITEM_BYTES = {"float32": 4}


@lru_cache(maxsize=4096)
def _most_served(sources: range, destinations: range, ranks_per_node: int) -> int:
    """The largest number of other ranks that one source sends a shard to."""
    load = Counter(
        choose_source(sources, destinations, dst, ranks_per_node)
        for dst in destinations
        if dst not in sources
    )
    return max(load.values(), default=0)


def _largest_staging(
    source: ShardLayout, target: ShardLayout, name: str, ranks_per_node: int
) -> int:
    """Upper bound, in elements, of what one rank sends plus receives for a tensor.

    Shards with the same holders lie on the same ranks, so their shares add up.
    """
    sends: Counter[range] = Counter()
    receives: Counter[range] = Counter()
    for dst in target.shards(name):
        receives[dst.holders] += dst.piece.hf_box.num_elements
    for src in source.shards(name):
        if src.mirror:
            continue
        for dst in target.shards(name):
            if box := src.piece.hf_box.intersect(dst.piece.hf_box):
                served = _most_served(src.holders, dst.holders, ranks_per_node)
                sends[src.holders] += box.num_elements * served
    return max(receives.values()) + max(sends.values())


def plan_rounds(
    source: ShardLayout,
    target: ShardLayout,
    bucket_bytes: int,
    item_bytes: int,
    ranks_per_node: int,
) -> tuple[tuple[str, ...], ...]:
    """HF tensor names of each round, the same on every rank. A round has one element type.

    Args:
        source: the sending layout.
        target: the receiving layout.
        bucket_bytes: bound of send plus receive staging of one round on one rank. A single tensor
            whose shards exceed it makes a round of its own.
        item_bytes: bytes of one element on the wire, for tensors without a type of their own.
        ranks_per_node: as in the plans.
    """
    if bucket_bytes < 1:
        raise ValueError(f"--reshard-bucket-mb gives {bucket_bytes} bytes; must be positive")
    rounds: list[tuple[str, ...]] = []
    current: list[str] = []
    used = 0
    for name in _interleave_stages(source):
        dtype = source.dtype_of(name)
        size = _ITEM_BYTES.get(dtype, item_bytes)
        cost = _largest_staging(source, target, name, ranks_per_node) * size
        other = bool(current) and source.dtype_of(current[0]) != dtype
        if current and (other or used + cost > bucket_bytes):
            rounds.append(tuple(current))
            current, used = [], 0
        current.append(name)
        used += cost
    if current:
        rounds.append(tuple(current))
    return tuple(rounds)


def _interleave_stages(source: ShardLayout) -> Sequence[str]:
    """Tensor names ordered so that the holders of neighbours differ: one of each stage in turn.

    Tensors with an element type of their own come last.
    """
    by_dtype: dict[str, dict[int, list[str]]] = {}
    for name in source.hf_shapes:
        first = next(shard for shard in source.shards(name) if not shard.mirror)
        by_holder = by_dtype.setdefault(source.dtype_of(name), {})
        by_holder.setdefault(first.holders.start, []).append(name)
    order: list[str] = []
    for dtype in sorted(by_dtype):
        queues = list(by_dtype[dtype].values())
        longest = max(len(queue) for queue in queues)
        order += [queue[i] for i in range(longest) for queue in queues if i < len(queue)]
    return order
