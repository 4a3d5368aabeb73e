"""Bytes that a rank moves in a weight sync, counted in its plan or estimated from some layers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from mindspeed_rl.weights.layouts.base import ShardLayout, element_bytes, locate
from mindspeed_rl.weights.planner import ReshardPlan, Transfer, overlaps

# A function from HF tensor to the bytes of one of its elements.
ElementBytes = Callable[[str], int]


def element_bytes_of(layout: ShardLayout, default: int) -> ElementBytes:
    """Return a function from HF tensor to element size; ``default`` is for the model's type."""
    return lambda name: element_bytes(layout.dtype_of(name), default)


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
    """

    rank: int
    receive_bytes: int
    send_bytes: int
    copy_bytes: int
    inter_node_receive_bytes: int
    inter_node_send_bytes: int
    num_senders: int

    @property
    def written_bytes(self) -> int:
        """All bytes that arrive; with a relay also those that are forwarded."""
        return self.receive_bytes + self.copy_bytes


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
    )


MOST_TENSORS = 6000
"""Tensors of which :func:`estimated_traffic` looks at every one; of more it takes some layers."""


@dataclass(slots=True)
class _Tally:
    """What one rank moves, as :class:`RankTraffic` counts it, before rounding."""

    rank: int
    node: int
    received: float = 0.0
    sent: float = 0.0
    copied: float = 0.0
    from_other_nodes: float = 0.0
    to_other_nodes: float = 0.0
    senders: set[int] = field(default_factory=set)

    def receive(self, size: float, sender: int, ranks_per_node: int) -> None:
        if sender == self.rank:
            self.copied += size
            return
        self.received += size
        self.senders.add(sender)
        self.from_other_nodes += size if sender // ranks_per_node != self.node else 0.0

    def send(self, size: float, receiver: int, ranks_per_node: int) -> None:
        self.sent += size
        self.to_other_nodes += size if receiver // ranks_per_node != self.node else 0.0

    def traffic(self) -> RankTraffic:
        return RankTraffic(
            rank=self.rank,
            receive_bytes=round(self.received),
            send_bytes=round(self.sent),
            copy_bytes=round(self.copied),
            inter_node_receive_bytes=round(self.from_other_nodes),
            inter_node_send_bytes=round(self.to_other_nodes),
            num_senders=len(self.senders),
        )


def estimated_traffic(
    source: ShardLayout,
    target: ShardLayout,
    ranks: Sequence[int],
    ranks_per_node: int,
    bytes_of: ElementBytes,
    *,
    relay: bool = False,
    most_tensors: int = MOST_TENSORS,
) -> list[RankTraffic]:
    """Count what some ranks move in a reshard, without making their plans. Local and pure.

    Of a model with more than ``most_tensors`` tensors on these ranks it looks at some layers of
    each kind and pipeline stage and takes the others to be equal; what a rank receives and copies
    is then still right, while what it sends and the number of its senders vary between layers.

    Args:
        source: Layout that is read.
        target: Layout that is written.
        ranks: Ranks to count for.
        ranks_per_node: Number of ranks per node.
        bytes_of: Function from HF tensor to the bytes of one of its elements.
        relay: As in :func:`~mindspeed_rl.weights.planner.plan_reshard`.
        most_tensors: Tensors to look at, if one layer of each kind is not more.
    """
    tallies = [_Tally(rank, rank // ranks_per_node) for rank in ranks]
    held = {n for rank in ranks for n in (*source.held_names(rank), *target.held_names(rank))}
    for name, weight in _some_layers(source, target, sorted(held), most_tensors):
        item = bytes_of(name) * weight
        for cell, wanted, box, assigned in overlaps(source, target, name, ranks_per_node, relay):
            size = box.num_elements * item
            for tally in tallies:
                needed = wanted.is_held_by(tally.rank)
                if needed:
                    tally.receive(size, assigned.source_of(tally.rank)[0], ranks_per_node)
                if needed or cell.is_held_by(tally.rank):
                    for receiver, _ in assigned.served_by(tally.rank):
                        tally.send(size, receiver, ranks_per_node)
    return [tally.traffic() for tally in tallies]


def _some_layers(
    source: ShardLayout, target: ShardLayout, names: Sequence[str], most: int
) -> Iterator[tuple[str, float]]:
    """Yield tensors of evenly spread layers of each kind, and how many layers each stands for."""
    kinds: dict[Hashable, dict[int, list[str]]] = {}
    for name in names:
        kind = source.placement_key(name), target.placement_key(name)
        kinds.setdefault(kind, {}).setdefault(locate(name)[1], []).append(name)
    share = min(1.0, most / max(1, len(names)))
    for layers in kinds.values():
        count = max(1, int(share * len(layers)))
        numbers = sorted(layers)
        for i in range(count):
            taken = numbers[i * len(numbers) // count]
            yield from ((name, len(numbers) / count) for name in layers[taken])
