"""Moves requests between the engines of a run while they generate.

At a settlement all engines report the progress of their requests, every rank computes the same
moves (:mod:`~mindspeed_rl.rollout.rebalance_plan`), and a request that moves is sent as tokens,
log-probs and the state of its random stream. Between two settlements engines are independent, for
as many steps as each makes in the same time; an engine that has no request left waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar, cast

import torch.distributed as dist

from mindspeed_rl.rollout.rebalance_plan import (
    Load,
    Move,
    Plan,
    Replica,
    StepCost,
    next_steps,
    plan_moves,
)
from mindspeed_rl.rollout.step_loop import StepStats
from mindspeed_rl.rollout.vllm.open_requests import OpenRequest, OpenRequests, Progress

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of rebalancing, equal on all ranks.

    Attributes:
        interval: Steps of the slowest engine between two settlements.
        groups_per_engine: Engine groups (ranks that share requests) per engine; they step together.
        running: Whether requests that have started move as well.
        min_gain: See :func:`~mindspeed_rl.rollout.rebalance_plan.plan_moves`.
        cost: Cost of engine steps.
        capacity: Sequences that run at once in an engine group.
        room: Tokens that the cache of an engine group holds.
    """

    interval: int
    groups_per_engine: int
    running: bool
    min_gain: float
    cost: StepCost
    capacity: int
    room: int


class Rebalancer:
    """The settlements of one rollout on this rank.

    Args:
        rules: Rules of rebalancing.
        group: Number of this rank's engine group, counted over all engines.
        leads: Whether this rank is the leader of its group and sends for it.
        expected: (sample id, tokens so far) -> expected length of the response; equal on all ranks.

    Attributes:
        steps: Steps of this rank's engine until the next settlement.
    """

    def __init__(
        self, rules: Rules, group: int, leads: bool, expected: Callable[[int, int], int]
    ) -> None:
        self.rules = rules
        self._group = group
        self._leads = leads
        self._expected = expected
        self.steps = rules.interval

    def rebalance_point(self, requests: OpenRequests, stats: StepStats) -> bool:
        """Exchange requests with the other engines. Collective: the world.

        Returns:
            Whether any engine has a request left.
        """
        start = time.perf_counter()
        reports = _of_all_ranks(requests.progress() if self._leads else None)
        groups = [progress for progress in reports if progress is not None]
        plan = self.plan(groups)
        self.steps = self.steps_after(plan)
        if moves := plan.moves:
            open_requests = self.take(requests, moves, stats)
            arrived = _of_all_ranks(open_requests if self._leads else [])
            self.deliver(requests, chain.from_iterable(arrived), moves)
        stats.settle_seconds += time.perf_counter() - start
        return any(groups)

    def plan(self, groups: Sequence[Sequence[Progress]]) -> Plan:
        """Plan the moves between groups, equally on all ranks. Local."""
        replicas = [
            Replica(
                tuple(
                    Load(
                        p.sample_id,
                        p.context,
                        max(1, self._expected(p.sample_id, p.generated) - p.generated),
                        p.computed,
                    )
                    for p in sorted(progress, key=lambda p: not p.computed)
                ),
                self.rules.capacity,
                self.rules.room,
            )
            for progress in groups
        ]
        rules = self.rules
        return plan_moves(replicas, rules.cost, min_gain=rules.min_gain, running=rules.running)

    def steps_after(self, plan: Plan) -> int:
        """Return the steps of this rank's engine until the next settlement. Local."""
        size = self.rules.groups_per_engine
        first = self._group // size * size
        steps = next_steps(plan.replicas, self.rules.cost, self.rules.interval)
        return min(steps[first : first + size])

    def take(
        self, requests: OpenRequests, moves: Sequence[Move], stats: StepStats
    ) -> list[OpenRequest]:
        """Remove and return the requests that leave this rank. Local; equal within its group."""
        leaving = [move.sample_id for move in moves if move.source == self._group]
        open_requests = requests.take(leaving)
        stats.moved += len(open_requests)
        stats.moved_tokens += sum(
            len(p.request.token_ids) + len(p.token_ids) for p in open_requests
        )
        return open_requests

    def deliver(
        self, requests: OpenRequests, open_requests: Iterable[OpenRequest], moves: Sequence[Move]
    ) -> None:
        """Add those of the moving requests that are for this rank. Local.

        Raises:
            RuntimeError: A request that moves here is missing.
        """
        awaited = {move.sample_id for move in moves if move.target == self._group}
        mine = [p for p in open_requests if p.request.sample_id in awaited]
        if missing := awaited - {p.request.sample_id for p in mine}:
            raise RuntimeError(f"rebalance: samples {sorted(missing)[:8]} did not arrive")
        requests.add(sorted(mine, key=lambda p: p.request.sample_id))


def _of_all_ranks(mine: T) -> list[T]:
    """Gather one object from each rank, ordered by rank. Collective: the world."""
    found: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return cast(list[T], found)
