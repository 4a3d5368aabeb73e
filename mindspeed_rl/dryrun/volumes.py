"""What a weight update moves and how long the links need for it: a few ranks, planned for real."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mindspeed_rl.config.validate import RLPlan
from mindspeed_rl.dryrun.machine import Machine
from mindspeed_rl.resharding.planner import plan_reshard
from mindspeed_rl.resharding.traffic import RankTraffic, element_bytes_of, rank_traffic


@dataclass(frozen=True, slots=True)
class UpdateVolume:
    """A weight update as some ranks see it.

    Attributes:
        ranks: the traffic of each rank that was planned, in bytes.
        seconds: of the busiest of them on the links of the machine, without latency and copies.
    """

    ranks: tuple[RankTraffic, ...]
    seconds: float


def update_volume(
    plan: RLPlan, ranks: Iterable[int], machine: Machine, item_bytes: int, relay: bool
) -> UpdateVolume:
    """Plan the update of some ranks. Pure; about a second per rank of a model of 671e9 weights.

    Args:
        plan: of the run.
        ranks: which.
        machine: gives links and nodes.
        item_bytes: of an element on the wire.
        relay: ``--reshard-relay`` on several nodes.
    """
    node = machine.ranks_per_node
    size = element_bytes_of(plan.megatron, item_bytes)
    traffic = tuple(
        rank_traffic(plan_reshard(plan.megatron, plan.vllm, rank, node, relay=relay), size, node)
        for rank in ranks
    )
    return UpdateVolume(traffic, max(_seconds(t, machine) for t in traffic))


def _seconds(traffic: RankTraffic, machine: Machine) -> float:
    """Both kinds of links one after the other; each in its busier direction."""
    inside = max(
        traffic.receive_bytes - traffic.inter_node_receive_bytes,
        traffic.send_bytes - traffic.inter_node_send_bytes,
    )
    at_full_rate = inside / (machine.within_node_gb_s * 1e9) + (
        traffic.busiest_inter_node_bytes / (machine.between_nodes_gb_s * 1e9)
    )
    return at_full_rate / machine.link_efficiency
