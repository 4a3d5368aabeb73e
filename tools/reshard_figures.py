"""Bytes of a reshard round by round, and the least that any reshard could move.

The lower bounds ("floors") follow from sets of elements: what a rank needs and does not hold must
arrive there; what some rank of a node needs and no rank of it holds must arrive at the node. Units
are bytes on the wire.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

from mindspeed_rl.core.boxes import Box, missing_elements
from mindspeed_rl.weight_layouts.base import ShardLayout, Unit
from mindspeed_rl.weights.planner import ReshardPlan, Transfer
from mindspeed_rl.weights.schedule import Schedule
from mindspeed_rl.weights.traffic import ElementBytes, RankTraffic

# --- rounds ------------------------------------------------------------------------------------


def busiest_bytes(traffic: RankTraffic) -> int:
    """Bytes of the busier direction of a rank: links are full duplex."""
    return max(traffic.receive_bytes, traffic.send_bytes)


def busiest_inter_node_bytes(traffic: RankTraffic) -> int:
    """Bytes of the busier direction of a rank between nodes."""
    return max(traffic.inter_node_receive_bytes, traffic.inter_node_send_bytes)


@dataclass(frozen=True, slots=True)
class RoundTraffic:
    """The bytes that one rank moves in each exchange: the hops of round 0, of round 1, and so on.

    Attributes:
        receive_bytes: Received bytes by exchange.
        send_bytes: Sent bytes by exchange.
        num_messages: Received messages of all exchanges: one per sender and exchange.
        num_alone: Rectangles that travel on their own instead with ``--reshard-transport p2p``.
    """

    receive_bytes: tuple[int, ...]
    send_bytes: tuple[int, ...]
    num_messages: int
    num_alone: int = 0

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
                elements = t.num_tensors * t.hf_box.slice(slot.part, slot.parts).num_elements
                if elements:
                    exchange = slot.round_of(t.src_rank, t.dst_rank) * num_hops + t.hop - 1
                    yield exchange, elements * size, t.src_rank

    received, sent = [0] * num_exchanges, [0] * num_exchanges
    messages = set()
    num_alone = 0
    for exchange, size, sender in parts(plan.receives):
        received[exchange] += size
        messages.add((exchange, sender))
        num_alone += size >= schedule.alone_bytes
    for exchange, size, _ in parts(plan.sends):
        sent[exchange] += size
    return RoundTraffic(tuple(received), tuple(sent), len(messages), num_alone)


def critical_bytes(ranks: Iterable[RoundTraffic]) -> int:
    """Sum the bytes of the busiest rank, max(sent, received), over exchanges."""
    busiest = (
        [max(pair) for pair in zip(r.receive_bytes, r.send_bytes, strict=True)] for r in ranks
    )
    return sum(max(exchange) for exchange in zip(*busiest, strict=True))


# --- floors ------------------------------------------------------------------------------------


def rank_floor(source: ShardLayout, target: ShardLayout, rank: int, bytes_of: ElementBytes) -> int:
    """Count bytes that a rank needs and does not hold. Local, pure, O(what the rank needs)."""

    def boxes(layout: ShardLayout, name: str) -> tuple[Box, ...]:
        return tuple(s.piece.hf_box for s in layout.shards(name) if rank in s.owner_ranks)

    return sum(
        missing_elements(boxes(target, name), boxes(source, name)) * bytes_of(name)
        for name in target.held_names(rank)
    )


def rank_need(target: ShardLayout, rank: int, bytes_of: ElementBytes) -> int:
    """Count bytes that a rank's engine needs: the floor where it shares no memory with a trainer.

    Local, pure, O(what the rank needs).
    """
    count = 0
    for name in target.held_names(rank):
        boxes = tuple(s.piece.hf_box for s in target.shards(name) if rank in s.owner_ranks)
        count += missing_elements(boxes, ()) * bytes_of(name)
    return count


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
