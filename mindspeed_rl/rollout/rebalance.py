"""Moves requests between the engines of a run while they generate.

At a rebalance point all engines report what is left of their requests, every rank computes the same
moves (:mod:`~mindspeed_rl.rollout.rebalance_plan`), and a request that moves is sent as tokens and
log-probs. Between two of these points engines are independent, for as many steps as each makes in
the same time; an engine that has no request left waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, TypeAlias

from mindspeed_rl.core.types import Completion
from mindspeed_rl.parallel.small_collectives import gather_objects
from mindspeed_rl.rollout.rebalance_plan import (
    Load,
    Move,
    Plan,
    Replica,
    StepCost,
    next_steps,
    plan_moves,
)
from mindspeed_rl.rollout.requests import GenerationRequest
from mindspeed_rl.rollout.stats import StepStats

ExpectedLength: TypeAlias = Callable[[int, int], int]
"""(sample id, tokens so far) -> expected length of the response; equal on all ranks."""


class MovableRequests(Protocol):
    """The unfinished requests of an engine. Its methods are local to the rank."""

    def loads(self, expected: ExpectedLength) -> list[Load]:
        """Return what is left of every request, in the order of their start."""
        ...

    def take(self, sample_ids: Sequence[int]) -> list[GenerationRequest]:
        """Stop requests and return them with their tokens so far as the prefix."""
        ...

    def add(self, requests: Iterable[GenerationRequest]) -> None:
        """Start requests, or continue them after their prefix."""
        ...


class Visits(Protocol):
    """Turns of conversations, some of them generated on another engine than their environments'."""

    @property
    def num_awaited(self) -> int:
        """Number of environments of this rank that have not answered yet."""
        ...

    def expected(self, sample_id: int, generated: int) -> int:
        """Return the expected tokens of a turn that has ``generated``."""
        ...

    def leaving(self) -> dict[int, Completion]:
        """Return the turns of other ranks' conversations that ended here since the last call."""
        ...

    def come_back(self, turns: Mapping[int, Completion]) -> None:
        """Pass on those of the turns that are of this rank's conversations."""
        ...


@dataclass(frozen=True, slots=True)
class _Report:
    """What an engine group tells all ranks at a rebalance point.

    Attributes:
        loads: What is left of its requests.
        turns: Turns of other groups' conversations that ended on it.
        num_awaited: Environments that have not answered it.
    """

    loads: list[Load]
    turns: dict[int, Completion]
    num_awaited: int


@dataclass(frozen=True, slots=True)
class RebalanceRules:
    """Rules of rebalancing, equal on all ranks.

    Attributes:
        interval: Steps of the slowest engine between two rebalance points.
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
    """The rebalance points of one rollout on this rank.

    Args:
        rules: Rules of rebalancing.
        group: Number of this rank's engine group, counted over all engines.
        leads: Whether this rank is the leader of its group and sends for it.
        expected: Estimates the length of a response.
        visits: Conversations of this rank; ``None`` where it has none.

    Attributes:
        steps: Steps of this rank's engine until the next rebalance point.
    """

    def __init__(
        self,
        rules: RebalanceRules,
        group: int,
        leads: bool,
        expected: ExpectedLength,
        visits: Visits | None = None,
    ) -> None:
        self.rules = rules
        self._group = group
        self._leads = leads
        self._visits = visits
        self.expected = expected
        self.steps = rules.interval

    def rebalance_point(self, requests: MovableRequests, stats: StepStats) -> bool:
        """Exchange requests with the other engines. Collective: the world.

        Returns:
            Whether any engine has a request left, or awaits one.
        """
        start = time.perf_counter()
        reports = [r for r in gather_objects(self._report(requests)) if r is not None]
        groups = [report.loads for report in reports]
        plan = self.plan(groups)
        self.steps = self.steps_after(plan)
        if moves := plan.moves:
            leaving = self.take(requests, moves, stats)
            arrived = gather_objects(leaving if self._leads else [])
            self.deliver(requests, chain.from_iterable(arrived), moves)
        turns = {i: turn for report in reports for i, turn in report.turns.items()}
        if self._visits is not None:
            self._visits.come_back(turns)
        stats.rebalance_seconds += time.perf_counter() - start
        return any(groups) or bool(turns) or any(report.num_awaited for report in reports)

    def _report(self, requests: MovableRequests) -> _Report | None:
        if not self._leads:
            return None
        if self._visits is None:
            return _Report(requests.loads(self.expected), {}, 0)
        loads = requests.loads(self._visits.expected)
        return _Report(loads, self._visits.leaving(), self._visits.num_awaited)

    def plan(self, groups: Sequence[Sequence[Load]]) -> Plan:
        """Plan the moves between groups, equally on all ranks. Local."""
        rules = self.rules
        replicas = [
            Replica(
                tuple(sorted(loads, key=lambda load: not load.computed)), rules.capacity, rules.room
            )
            for loads in groups
        ]
        return plan_moves(replicas, rules.cost, min_gain=rules.min_gain, running=rules.running)

    def steps_after(self, plan: Plan) -> int:
        """Return the steps of this rank's engine until the next rebalance point. Local."""
        size = self.rules.groups_per_engine
        first = self._group // size * size
        own = range(first, first + size)
        return next_steps(plan.replicas, self.rules.cost, self.rules.interval, own)

    def take(
        self, requests: MovableRequests, moves: Sequence[Move], stats: StepStats
    ) -> list[GenerationRequest]:
        """Remove and return the requests that leave this rank. Local; equal within its group."""
        leaving = requests.take([m.sample_id for m in moves if m.source == self._group])
        stats.moved += len(leaving)
        stats.moved_tokens += sum(len(r.token_ids) + len(r.prefix_tokens) for r in leaving)
        return leaving

    def deliver(
        self,
        requests: MovableRequests,
        arrived: Iterable[GenerationRequest],
        moves: Sequence[Move],
    ) -> None:
        """Add those of the moving requests that are for this rank. Local.

        Raises:
            RuntimeError: A request that moves here is missing.
        """
        awaited = {move.sample_id for move in moves if move.target == self._group}
        mine = [request for request in arrived if request.sample_id in awaited]
        if missing := awaited - {request.sample_id for request in mine}:
            raise RuntimeError(f"rebalance: samples {sorted(missing)[:8]} did not arrive")
        requests.add(sorted(mine, key=lambda request: request.sample_id))
