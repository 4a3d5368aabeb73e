"""What each way of resharding moves: ``direct`` counted from plans, the others by arithmetic."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.peer_links import (
    LinkBytes,
    gather_from_other_nodes,
    gather_links,
    stream_from_other_nodes,
    stream_links,
    two_stage_from_other_nodes,
    two_stage_links,
)
from bench.peer_volumes import Volumes, gather_volumes, stream_volumes, two_stage_volumes
from plan_stream import is_planned, rounds_of_stream, whole_tensor_bytes, with_planned_rounds

from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.observability.progress import RunProgress
from mindspeed_rl.resharding.executor import ROUNDS_IN_FLIGHT, round_bytes, split_rounds
from mindspeed_rl.resharding.layouts.from_text import rollout_from_text, training_from_text
from mindspeed_rl.resharding.layouts.hf_file import HfFileLayout
from mindspeed_rl.resharding.layouts.megatron import MegatronLayout
from mindspeed_rl.resharding.layouts.vllm import VllmLayout
from mindspeed_rl.resharding.planner import plan_reshard
from mindspeed_rl.resharding.schedule import Schedule, plan_schedule
from mindspeed_rl.resharding.traffic import (
    RankTraffic,
    RoundTraffic,
    Spread,
    critical_bytes,
    element_bytes_of,
    node_floors,
    rank_floor,
    rank_traffic,
    round_traffic,
)

BF16_BYTES, MIB = 2, 2**20


@dataclass(frozen=True, slots=True)
class Problem:
    """What is asked: a model, two layouts as text, and the machine.

    Attributes:
        spec: the model.
        train: ``--train``.
        rollout: ``--rollout``.
        world: all ranks.
        ranks: those that are looked at.
        ranks_per_node: neighbouring ranks with fast links.
        bucket_bytes: bound of all staging of a rank: of the rounds on their way.
        relay: look at ``direct`` with a relay, too.
    """

    spec: ModelSpec
    train: str
    rollout: str
    world: int
    ranks: Sequence[int]
    ranks_per_node: int
    bucket_bytes: int
    relay: bool = False

    def layouts(self) -> tuple[MegatronLayout, VllmLayout]:
        """Both layouts, with nothing looked up yet: what a rank begins with."""
        return (
            training_from_text(self.spec, self.train, self.world),
            rollout_from_text(self.spec, self.rollout, self.world),
        )


@dataclass(frozen=True, slots=True)
class Strategy:
    """What one way of resharding costs the ranks that are looked at.

    Attributes:
        name: ``direct``, ``relay``, ``stream``, ``gather`` or ``two-stage``.
        recv_bytes: from other ranks.
        inter_node_bytes: the part of it from other nodes.
        intra_node_bytes: the part of it from the same node.
        send_bytes: to other ranks.
        critical_bytes: sum over rounds of the largest max(sent, received) of a rank.
        link_bytes: ``critical_bytes`` by kind of link.
        peak_staging_bytes: of the rank that needs most at one time.
        messages_per_rank: received, mean.
        rounds: collective calls that a rank takes part in.
        plan_s: processor time of one rank that plans from nothing; 0 where nothing is planned:
            rounds, messages and staging are then those of full buckets.
    """

    name: str
    recv_bytes: Spread
    inter_node_bytes: Spread
    intra_node_bytes: Spread
    send_bytes: Spread
    critical_bytes: int
    link_bytes: LinkBytes
    peak_staging_bytes: int
    messages_per_rank: float
    rounds: int
    plan_s: float


@dataclass(frozen=True, slots=True)
class Findings:
    """All strategies of a problem, and the least that any could move.

    Attributes:
        floors: per rank that is looked at.
        node_floors: per node, of all nodes.
        strategies: ``direct`` first.
    """

    floors: dict[int, int]
    node_floors: dict[int, int]
    strategies: tuple[Strategy, ...]


def inspect(problem: Problem) -> Findings:
    """Plan the ranks that are looked at, count, and compare with the peers' ways.

    Raises:
        ValueError: layouts that do not fit the model or the world.
    """
    source, target = problem.layouts()
    bytes_of = element_bytes_of(source, BF16_BYTES)
    return Findings(
        {rank: rank_floor(source, target, rank, bytes_of) for rank in problem.ranks},
        node_floors(source, target, bytes_of, problem.ranks_per_node),
        (
            _direct(problem),
            *([_direct(problem, relay=True)] if problem.relay else []),
            *_others(problem, source, target),
        ),
    )


def _seconds(work: Callable[[], object]) -> float:
    """Of the processor: planning is plain computation, and the machine may be busy."""
    start = time.process_time()
    work()
    return time.process_time() - start


def _direct(problem: Problem, relay: bool = False) -> Strategy:
    """Count the plans of the ranks."""
    per_node = problem.ranks_per_node

    def plan_one() -> object:
        fresh = problem.layouts()
        plan = plan_reshard(*fresh, problem.ranks[0], per_node, relay=relay)
        return split_rounds(plan, _schedule(problem, *fresh, relay), fresh[0], 1 + relay)

    plan_s = _seconds(plan_one)
    source, target = problem.layouts()
    bytes_of = element_bytes_of(source, BF16_BYTES)
    schedule = _schedule(problem, source, target, relay)
    totals: list[RankTraffic] = []
    by_round: list[RoundTraffic] = []
    count = len(problem.ranks)
    name = "relay" if relay else "direct"
    progress = RunProgress(count, 0, f"{name}: planning ranks", count > 1, max(1, count // 4))
    for number, rank in enumerate(problem.ranks, start=1):
        plan = plan_reshard(source, target, rank, per_node, relay=relay)
        totals.append(rank_traffic(plan, bytes_of, per_node))
        by_round.append(round_traffic(plan, schedule, source, bytes_of))
        progress.update(number, {})
    progress.close()
    critical = critical_bytes(by_round)
    in_flight = min(ROUNDS_IN_FLIGHT, schedule.num_rounds)
    return Strategy(
        name=name,
        recv_bytes=Spread.of([t.receive_bytes for t in totals]),
        inter_node_bytes=Spread.of([t.inter_node_receive_bytes for t in totals]),
        intra_node_bytes=Spread.of([t.receive_bytes - t.inter_node_receive_bytes for t in totals]),
        send_bytes=Spread.of([t.send_bytes for t in totals]),
        critical_bytes=critical,
        link_bytes=_direct_links(totals, critical),
        peak_staging_bytes=in_flight * max(r.peak_bytes for r in by_round),
        messages_per_rank=sum(r.num_messages for r in by_round) / count,
        rounds=schedule.num_rounds,
        plan_s=plan_s,
    )


def _schedule(
    problem: Problem, source: MegatronLayout, target: VllmLayout, relay: bool
) -> Schedule:
    """The rounds as the executor asks for them."""
    return plan_schedule(
        source,
        target,
        bucket_bytes=round_bytes(problem.bucket_bytes),
        item_bytes=BF16_BYTES,
        ranks_per_node=problem.ranks_per_node,
        relay=relay,
    )


def _direct_links(totals: Sequence[RankTraffic], critical: int) -> LinkBytes:
    """The critical bytes, split as the bytes between nodes of the rank that has most of them."""
    busiest = max(totals, key=lambda t: (t.busiest_inter_node_bytes, t.busiest_bytes))
    between = min(busiest.busiest_inter_node_bytes, critical)
    return LinkBytes(critical - between, between)


def _stream(problem: Problem, source: MegatronLayout, target: VllmLayout) -> Strategy:
    """Bytes by arithmetic; rounds, messages and staging from the plan of the first rank."""
    per_node, world = problem.ranks_per_node, problem.world
    volumes = stream_volumes(source, target, BF16_BYTES, problem.bucket_bytes)
    bytes_of = element_bytes_of(source, BF16_BYTES)
    files = HfFileLayout.of(source, range(world))
    nodes = node_floors(source, files, bytes_of, per_node)
    planned = is_planned(source, world)
    start = time.process_time()
    if planned:
        schedule, traffic = rounds_of_stream(
            source,
            files,
            rank=problem.ranks[0],
            bucket_bytes=problem.bucket_bytes,
            item_bytes=BF16_BYTES,
            ranks_per_node=per_node,
            bytes_of=bytes_of,
        )
        whole_bytes = whole_tensor_bytes(schedule, source, bytes_of)
        volumes = with_planned_rounds(volumes, schedule, traffic, whole_bytes)
    plan_s = time.process_time() - start if planned else 0.0
    links = stream_links(volumes, nodes)
    foreign = stream_from_other_nodes(world, per_node, nodes)
    return _strategy(problem, "stream", volumes, links, foreign, plan_s)


def _others(problem: Problem, source: MegatronLayout, target: VllmLayout) -> tuple[Strategy, ...]:
    per_node = problem.ranks_per_node
    gather = gather_volumes(source, target, BF16_BYTES)
    two_stage = two_stage_volumes(source, target, BF16_BYTES)
    return (
        _stream(problem, source, target),
        _strategy(
            problem,
            "gather",
            gather,
            gather_links(source, BF16_BYTES, per_node),
            gather_from_other_nodes(source, BF16_BYTES, per_node),
        ),
        _strategy(
            problem,
            "two-stage",
            two_stage,
            two_stage_links(source, target, BF16_BYTES, per_node),
            two_stage_from_other_nodes(source, target, BF16_BYTES, per_node),
        ),
    )


def _strategy(
    problem: Problem,
    name: str,
    volumes: Volumes,
    links: LinkBytes,
    from_other_nodes: Sequence[int],
    plan_s: float = 0.0,
) -> Strategy:
    received, foreign = volumes.recv_bytes, from_other_nodes
    return Strategy(
        name,
        Spread.of([received[rank] for rank in problem.ranks]),
        Spread.of([foreign[rank] for rank in problem.ranks]),
        Spread.of([received[rank] - foreign[rank] for rank in problem.ranks]),
        Spread.of([volumes.send_bytes[rank] for rank in problem.ranks]),
        volumes.critical_bytes,
        links,
        volumes.peak_staging_bytes,
        volumes.messages_per_rank,
        volumes.collectives,
        plan_s,
    )
