"""Replays recorded response lengths through the planner: what moving requests would gain.

Layer 0. The clock is that of the cost model, so a result is a ratio of times, not seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mindspeed_rl.rollout.rebalance_plan import (
    Load,
    Replica,
    StepCost,
    next_steps,
    plan_moves,
    run_segment,
)


@dataclass(frozen=True, slots=True)
class Response:
    """A recorded response.

    Attributes:
        number: its own.
        prompt: tokens.
        length: tokens.
    """

    number: int
    prompt: int
    length: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """A simulated rollout.

    Attributes:
        time: of the slowest replica, in units of :class:`StepCost`.
        steps: decode steps of the slowest replica.
        moved: requests that changed their replica, each time counted.
        moved_tokens: contexts that were read again for them.
        idle: share of the time of all replicas in which they wait.
    """

    time: float
    steps: int
    moved: int
    moved_tokens: int
    idle: float


@dataclass(frozen=True, slots=True)
class Policy:
    """When and what is moved; see the flags ``--rollout-rebalance*``.

    Attributes:
        mode: ``off``, ``waiting`` or ``all``.
        interval: decode steps between settlements.
        min_gain: of a change of the plan.
        settle_time: of a settlement, in units of :class:`StepCost`.
    """

    mode: str = "off"
    interval: int = 128
    min_gain: float = 0.05
    settle_time: float = 0.0


def simulate(
    shares: Sequence[Sequence[Response]],
    capacity: int,
    room: int,
    cost: StepCost,
    policy: Policy,
    expected: Callable[[int, int], int],
) -> Outcome:
    """One rollout.

    Args:
        shares: what each replica begins with, in order.
        capacity: sequences that run at once on a replica.
        room: tokens in the cache of a replica.
        cost: of engine steps.
        policy: what is moved when.
        expected: (number of the response, tokens so far) -> expected length: all that the planner
            knows.
    """
    truth = {r.number: r for share in shares for r in share}
    state = [
        Replica(tuple(Load(r.number, r.prompt, r.length, False) for r in share), capacity, room)
        for share in shares
    ]
    still = policy.mode == "off"
    limits: list[float] = [math.inf if still else policy.interval] * len(shares)
    time, busy, moved, moved_tokens = 0.0, 0.0, 0, 0
    steps = [0] * len(shares)
    while any(replica.loads for replica in state):
        parts = [run_segment(r, cost, limit) for r, limit in zip(state, limits, strict=True)]
        time += max(p.time for p in parts)
        busy += sum(p.time for p in parts)
        steps = [n + p.steps for n, p in zip(steps, parts, strict=True)]
        state = [replace(r, loads=p.rest) for r, p in zip(state, parts, strict=True)]
        if still or not any(replica.loads for replica in state):
            continue
        time += policy.settle_time
        guessed = [_guessed(replica, truth, expected) for replica in state]
        plan = plan_moves(guessed, cost, min_gain=policy.min_gain, running=policy.mode == "all")
        limits = list(next_steps(plan.replicas, cost, policy.interval))
        everything = {load.sample_id: load for replica in state for load in replica.loads}
        targets = {move.sample_id: move.target for move in plan.moves}
        moved += len(targets)
        moved_tokens += sum(everything[i].context for i in targets)
        state = [_after(replica, i, targets, everything) for i, replica in enumerate(state)]
    return Outcome(time, max(steps), moved, moved_tokens, 1 - busy / (time * len(shares)))


def _guessed(
    replica: Replica, truth: Mapping[int, Response], expected: Callable[[int, int], int]
) -> Replica:
    """The loads as the planner sees them, without knowing their lengths."""
    loads = []
    for load in replica.loads:
        generated = load.context - truth[load.sample_id].prompt
        remaining = expected(load.sample_id, generated) - generated
        loads.append(replace(load, remaining=max(1, remaining)))
    return replace(replica, loads=tuple(loads))


def _after(
    replica: Replica, number: int, targets: dict[int, int], everything: dict[int, Load]
) -> Replica:
    kept = [load for load in replica.loads if load.sample_id not in targets]
    come = [replace(everything[i], computed=False) for i, target in targets.items()
            if target == number]  # fmt: skip
    return replace(replica, loads=(*kept, *come))
