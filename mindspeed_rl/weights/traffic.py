"""Bytes that a reshard moves, and the least that any reshard could move: counted, not timed.

The lower bounds ("floors") follow from sets of elements: what a rank needs and does not hold must
arrive there; what some rank of a node needs and no rank of it holds must arrive at the node. Units
are bytes on the wire.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mindspeed_rl.core.boxes import Box
from mindspeed_rl.weights.layouts.base import ShardLayout, Unit
from mindspeed_rl.weights.planner import ReshardPlan, Transfer
from mindspeed_rl.weights.schedule import Schedule

# A function from HF tensor to the bytes of one of its elements.
ElementBytes = Callable[[str], int]

_DECLARED_BYTES = {"float32": 4}


def element_bytes_of(layout: ShardLayout, default: int) -> ElementBytes:
    """Return a function from HF tensor to element size; ``default`` is for the model's type."""
    return lambda name: _DECLARED_BYTES.get(layout.dtype_of(name), default)


@dataclass(frozen=True, slots=True)
class TrafficSpread:
    """Smallest, mean and largest value of some ranks."""

    min: int
    mean: float
    max: int

    @classmethod
    def of(cls, values: Sequence[int]) -> TrafficSpread:
        """Compute the spread of at least one value."""
        return cls(min(values), sum(values) / len(values), max(values))


@dataclass(frozen=True, slots=True)
class RankTraffic:
    """The bytes that one rank moves in a reshard.

    Attributes:
        rank: The rank.
        receive_bytes: Bytes from other ranks.
        send_bytes: Bytes to other ranks.
        copy_bytes: Bytes from its own training shard to its own inference shard.
        inter_node_receive_bytes: The part of ``receive_bytes`` that comes from other nodes.
        inter_node_send_bytes: The part of ``send_bytes`` that goes to other nodes.
        num_senders: Number of ranks that it receives from.
        num_receivers: Number of ranks that it sends to.
    """

    rank: int
    receive_bytes: int
    send_bytes: int
    copy_bytes: int
    inter_node_receive_bytes: int
    inter_node_send_bytes: int
    num_senders: int
    num_receivers: int

    @property
    def busiest_bytes(self) -> int:
        """Bytes of the busier direction: links are full duplex."""
        return max(self.receive_bytes, self.send_bytes)

    @property
    def busiest_inter_node_bytes(self) -> int:
        """Bytes of the busier direction between nodes."""
        return max(self.inter_node_receive_bytes, self.inter_node_send_bytes)


def rank_traffic(plan: ReshardPlan, bytes_of: ElementBytes, ranks_per_node: int) -> RankTraffic:
    """Count the traffic of one rank's plan. Local and pure."""
    node = plan.rank // ranks_per_node

    def size(transfers: Iterable[Transfer]) -> int:
        return sum(t.hf_box.num_elements * bytes_of(t.hf_name) for t in transfers)

    return RankTraffic(
        rank=plan.rank,
        receive_bytes=size(plan.receives),
        send_bytes=size(plan.sends),
        copy_bytes=size(plan.copies),
        inter_node_receive_bytes=size(
            t for t in plan.receives if t.src_rank // ranks_per_node != node
        ),
        inter_node_send_bytes=size(t for t in plan.sends if t.dst_rank // ranks_per_node != node),
        num_senders=len({t.src_rank for t in plan.receives}),
        num_receivers=len({t.dst_rank for t in plan.sends}),
    )


# --- rounds ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoundTraffic:
    """The bytes that one rank moves in each exchange: the hops of round 0, of round 1, and so on.

    Attributes:
        receive_bytes: Received bytes by exchange.
        send_bytes: Sent bytes by exchange.
        num_messages: Received messages of all exchanges: one per sender and exchange.
    """

    receive_bytes: tuple[int, ...]
    send_bytes: tuple[int, ...]
    num_messages: int

    @property
    def peak_bytes(self) -> int:
        """Sent plus received bytes of the largest exchange, which its staging has to hold."""
        return max(map(sum, zip(self.receive_bytes, self.send_bytes, strict=True)))


def round_traffic(
    plan: ReshardPlan, schedule: Schedule, source: ShardLayout, bytes_of: ElementBytes
) -> RoundTraffic:
    """Count the traffic of one rank's plan by exchanges. Local and pure.

    Args:
        plan: Plan of one rank, with or without a relay.
        schedule: Schedule of the same reshard.
        source: Layout that the reshard reads.
        bytes_of: Function that returns the bytes of an element of each tensor.
    """
    num_hops = max((t.hop for t in (*plan.sends, *plan.receives)), default=1)
    num_exchanges = num_hops * schedule.num_rounds

    def parts(transfers: Iterable[Transfer]) -> Iterator[tuple[int, int, int]]:
        """Yield (exchange, bytes, sender) of every slice."""
        for t in transfers:
            size = bytes_of(t.hf_name)
            for slot in schedule.slots_of(source, t.hf_name):
                elements = t.hf_box.slice(slot.part, slot.parts).num_elements
                if elements:
                    yield slot.round * num_hops + t.hop - 1, elements * size, t.src_rank

    received, sent = [0] * num_exchanges, [0] * num_exchanges
    messages = set()
    for exchange, size, sender in parts(plan.receives):
        received[exchange] += size
        messages.add((exchange, sender))
    for exchange, size, _ in parts(plan.sends):
        sent[exchange] += size
    return RoundTraffic(tuple(received), tuple(sent), len(messages))


def critical_bytes(ranks: Iterable[RoundTraffic]) -> int:
    """Sum the bytes of the busiest rank, max(sent, received), over exchanges."""
    busiest = (
        [max(pair) for pair in zip(r.receive_bytes, r.send_bytes, strict=True)] for r in ranks
    )
    return sum(max(exchange) for exchange in zip(*busiest, strict=True))


# --- floors ------------------------------------------------------------------------------------


def _without(box: Box, hole: Box) -> Iterator[Box]:
    """Yield disjoint rectangles that cover ``box`` but not ``hole``."""
    common = box.intersect(hole)
    if common is None:
        yield box
        return
    rest = box
    for dim in range(len(box.lo)):
        lo, end = rest.lo[dim], rest.lo[dim] + rest.size[dim]
        inner_lo, inner_end = common.lo[dim], common.lo[dim] + common.size[dim]
        if lo < inner_lo:
            yield rest.with_dim(dim, lo, inner_lo - lo)
        if inner_end < end:
            yield rest.with_dim(dim, inner_end, end - inner_end)
        rest = rest.with_dim(dim, inner_lo, inner_end - inner_lo)


@lru_cache(maxsize=1 << 16)
def missing_elements(wanted: tuple[Box, ...], present: tuple[Box, ...]) -> int:
    """Count elements in the union of ``wanted`` that no rectangle of ``present`` holds."""
    holes, count = list(present), 0
    for box in wanted:
        parts = [box]
        for hole in holes:
            parts = [rest for part in parts for rest in _without(part, hole)]
        count += sum(part.num_elements for part in parts)
        holes.append(box)
    return count


def rank_floor(source: ShardLayout, target: ShardLayout, rank: int, bytes_of: ElementBytes) -> int:
    """Count bytes that a rank needs and does not hold. Local, pure, O(what the rank needs)."""

    def boxes(layout: ShardLayout, name: str) -> tuple[Box, ...]:
        return tuple(s.piece.hf_box for s in layout.shards(name) if rank in s.owner_ranks)

    return sum(
        missing_elements(boxes(target, name), boxes(source, name)) * bytes_of(name)
        for name in target.held_names(rank)
    )


def node_floors(
    source: ShardLayout,
    target: ShardLayout,
    bytes_of: ElementBytes,
    ranks_per_node: int,
) -> dict[int, int]:
    """Count the bytes that each node needs and does not hold, once per node.

    Tensors that are placed alike are counted together.
    """

    def boxes(layout: ShardLayout, name: str) -> dict[int, dict[Box, None]]:
        of_nodes: dict[int, dict[Box, None]] = {}
        for shard in layout.shards(name):
            for node in {rank // ranks_per_node for rank in shard.owner_ranks}:
                of_nodes.setdefault(node, {})[shard.piece.hf_box] = None
        return of_nodes

    def of_unit(unit: Unit) -> Counter[int]:
        missing: Counter[int] = Counter()
        for name in unit.names:
            present = boxes(source, name)
            for node, wanted in boxes(target, name).items():
                elements = missing_elements(tuple(wanted), tuple(present.get(node, ())))
                missing[node] += elements * bytes_of(name)
        return missing

    known: dict[Hashable, Counter[int]] = {}
    floors: Counter[int] = Counter()
    for unit in source.units():
        first = unit.names[0]
        key = source.placement_key(first), target.placement_key(first)
        if key not in known:
            known[key] = of_unit(unit)
        floors.update(known[key])
    return dict(floors)
