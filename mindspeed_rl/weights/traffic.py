"""Bytes that a rank moves in a weight sync, counted in its plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mindspeed_rl.weight_layouts.base import ShardLayout, element_bytes
from mindspeed_rl.weights.planner import ReshardPlan, Transfer

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
        return sum(t.num_elements * bytes_of(t.hf_name) for t in transfers)

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
