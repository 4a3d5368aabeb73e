"""Which rank sends which rectangle to whom: pure arithmetic, each rank alone.

HF tensors are the common coordinates. A destination rank needs the intersection of its own piece
with each source shard; among the ranks that hold that source shard exactly one sends, chosen by
:func:`choose_source`. The choice has a closed-form inverse (:func:`destinations_of`), so a rank
computes what it receives and what it sends without looking at any other rank, at a cost of
O(own transfers).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from mindspeed_rl.resharding.boxes import Box, ParamView
from mindspeed_rl.resharding.layouts.base import Shard, ShardLayout


@dataclass(frozen=True, slots=True)
class Transfer:
    """One rectangle from one rank's parameter to another's (or the same rank's)."""

    src_rank: int
    dst_rank: int
    hf_name: str
    hf_box: Box
    src_param: str
    src_box: Box
    src_view: ParamView
    dst_param: str
    dst_box: Box
    dst_view: ParamView


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """Everything that one rank does in a reshard.

    ``sends``, ``receives`` and ``copies`` are sorted by (tensor, position), so that both ends of a
    message list its rectangles in the same order. ``digest`` is equal on all ranks of a reshard.
    """

    rank: int
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    copies: tuple[Transfer, ...]
    digest: str


def _in_range(values: range, lo: int, hi: int) -> range:
    """The members of an arithmetic progression that lie in ``[lo, hi)``."""
    step = values.step
    first = max(0, -(-(lo - values.start) // step))
    last = min(len(values), -(-(hi - values.start) // step))
    return values[first : max(first, last)]


def _node(rank: int, ranks_per_node: int) -> tuple[int, int]:
    start = rank // ranks_per_node * ranks_per_node
    return start, start + ranks_per_node


def choose_source(sources: range, destinations: range, dst: int, ranks_per_node: int) -> int:
    """The rank of ``sources`` that serves ``dst``.

    Itself when it holds the shard, else a rank of its node (spread by position within the node),
    else replica ``floor(i S / D)`` for the ``i``-th of ``D`` destinations and ``S`` sources.
    """
    if dst in sources:
        return dst
    lo, hi = _node(dst, ranks_per_node)
    near = _in_range(sources, lo, hi)
    if near:
        return near[(dst - lo) * len(near) // ranks_per_node]
    return sources[destinations.index(dst) * len(sources) // len(destinations)]


def destinations_of(
    sources: range, destinations: range, src: int, ranks_per_node: int
) -> Iterator[int]:
    """The ranks whose :func:`choose_source` is ``src``: its inverse, in ascending order."""
    found = set()
    if src in destinations:
        found.add(src)
    lo, hi = _node(src, ranks_per_node)
    near = _in_range(sources, lo, hi)
    for dst in _in_range(destinations, lo, hi):
        if dst not in sources and near[(dst - lo) * len(near) // ranks_per_node] == src:
            found.add(dst)
    position, num_sources, num_dst = sources.index(src), len(sources), len(destinations)
    first = -(-position * num_dst // num_sources)
    last = -(-(position + 1) * num_dst // num_sources)
    for dst in destinations[first:last]:
        if dst not in sources and not _in_range(sources, *_node(dst, ranks_per_node)):
            found.add(dst)
    yield from sorted(found)


def _transfer(src: Shard, dst: Shard, box: Box, src_rank: int, dst_rank: int) -> Transfer:
    return Transfer(
        src_rank,
        dst_rank,
        src.piece.hf_name,
        box,
        src.piece.param,
        box.moved(src.piece.hf_box, src.piece.param_box),
        src.piece.view,
        dst.piece.param,
        box.moved(dst.piece.hf_box, dst.piece.param_box),
        dst.piece.view,
    )


def _overlaps(source: ShardLayout, target: ShardLayout) -> Iterator[tuple[Shard, Shard, Box]]:
    for name in target.hf_shapes:
        for dst in target.shards(name):
            for src in source.shards(name):
                if not src.mirror and (box := src.piece.hf_box.intersect(dst.piece.hf_box)):
                    yield src, dst, box


def plan_reshard(
    source: ShardLayout, target: ShardLayout, rank: int, ranks_per_node: int
) -> ReshardPlan:
    """The plan of one rank. Local and pure: every rank may call it alone.

    Raises:
        RuntimeError: the two layouts disagree on the names or shapes of the HF tensors.
    """
    check_same_tensors(source, target)
    sends: list[Transfer] = []
    receives: list[Transfer] = []
    copies: list[Transfer] = []
    for src, dst, box in _overlaps(source, target):
        if rank in dst.holders:
            sender = choose_source(src.holders, dst.holders, rank, ranks_per_node)
            where = copies if sender == rank else receives
            where.append(_transfer(src, dst, box, sender, rank))
        if rank in src.holders:
            for receiver in destinations_of(src.holders, dst.holders, rank, ranks_per_node):
                if receiver != rank:
                    sends.append(_transfer(src, dst, box, rank, receiver))
    digest = layout_digest(source, target, ranks_per_node)
    return ReshardPlan(rank, tuple(sends), tuple(receives), tuple(copies), digest)


def check_same_tensors(source: ShardLayout, target: ShardLayout) -> None:
    """Both sides must speak of the same HF tensors."""
    if dict(source.hf_shapes) == dict(target.hf_shapes):
        return
    differing = [
        f"{name}: {source.hf_shapes.get(name)} -> {target.hf_shapes.get(name)}"
        for name in sorted({*source.hf_shapes, *target.hf_shapes})
        if source.hf_shapes.get(name) != target.hf_shapes.get(name)
    ]
    raise RuntimeError("reshard: source and target disagree on " + "; ".join(differing[:5]))


def layout_digest(source: ShardLayout, target: ShardLayout, ranks_per_node: int) -> str:
    """A hex digest of everything that a plan depends on; equal on all ranks or nobody sends."""
    state = hashlib.blake2b(digest_size=32)
    state.update(str(ranks_per_node).encode())
    for layout in (source, target):
        for name in layout.hf_shapes:
            for shard in layout.shards(name):
                state.update(repr(shard).encode())
    return state.hexdigest()
