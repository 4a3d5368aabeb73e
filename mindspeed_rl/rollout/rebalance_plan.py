"""Plans which requests move between replicas of the engine while a rollout is running.

The functions are pure and their arguments equal on all ranks, so every rank computes the same
moves by itself. A request moves as its tokens: the replica that takes it over reads the prompt and
the tokens generated so far in one prefill. :class:`StepCost` says whether that pays.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

# Limit of the changes of a plan, per replica; each change moves a batch of requests.
_CHANGES_PER_REPLICA = 4
# Standard deviation over mean of the error of an estimated response length, on the safe side.
_DOUBT = 1.0


@dataclass(frozen=True, slots=True)
class StepCost:
    """Roofline of engine steps, whose unit of time is one reading of the weights.

    Attributes:
        ridge_tokens: Tokens that are computed in the time in which the weights are read: peak
            FLOPs over bytes per second, for 16-bit weights.
        context_tokens: Cached tokens whose keys and values take as long to read as the weights.
        sizes: Captured graph sizes, ascending; a batch is padded to the next one.
    """

    ridge_tokens: float
    context_tokens: float = math.inf
    sizes: tuple[int, ...] = ()

    def decode(self, running: int) -> float:
        """Return the time of a decode step of ``running`` sequences without their contexts."""
        place = bisect_left(self.sizes, running)
        padded = self.sizes[place] if place < len(self.sizes) else running
        return max(1.0, padded / self.ridge_tokens)

    def steps(self, steps: int, running: int, context: int) -> float:
        """Return the time of ``steps`` decode steps that start with ``context`` tokens in all."""
        read = steps * context + running * steps * (steps - 1) // 2
        return steps * self.decode(running) + read / self.context_tokens

    def prefill(self, tokens: int) -> float:
        """Return the time that a prefill of ``tokens`` adds to the decode steps."""
        return tokens / self.ridge_tokens


@dataclass(frozen=True, slots=True)
class Load:
    """An unfinished request as the planner sees it.

    Attributes:
        sample_id: Sample of the request.
        context: Number of tokens of the prompt and generated so far.
        remaining: Expected number of tokens still to be generated, at least 1.
        computed: Whether the context is in the cache of its replica.
    """

    sample_id: int
    context: int
    remaining: int
    computed: bool


@dataclass(frozen=True, slots=True)
class Replica:
    """The unfinished requests and the limits of one replica.

    Attributes:
        loads: Requests in the order of their start, those that are computed first.
        capacity: Number of sequences that run at once.
        room: Number of tokens that the cache holds.
    """

    loads: tuple[Load, ...]
    capacity: int
    room: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of decode steps of one replica.

    Attributes:
        time: Duration in the unit of :class:`StepCost`.
        steps: Number of decode steps.
        rest: Requests that are not finished at its end.
    """

    time: float
    steps: int
    rest: tuple[Load, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The decision at one rebalance point.

    Attributes:
        moves: Moves sorted by sample id, at most one per request.
        replicas: Replicas after the moves.
    """

    moves: list[Move]
    replicas: list[Replica]


@dataclass(frozen=True, slots=True)
class Move:
    """The move of a request from one replica to another."""

    sample_id: int
    source: int
    target: int


def run_segment(replica: Replica, cost: StepCost, max_steps: float = math.inf) -> Segment:
    """Simulate a replica to its end, or for at most ``max_steps`` decode steps.

    A request starts when a place is free and the cache has room for it at its full length.
    """
    waiting = list(reversed(replica.loads))
    active: list[tuple[int, int]] = []  # (step of the end, index of the load)
    started: list[tuple[Load, int]] = []  # (load, step of its start)
    now, time, context, reserved = 0, 0.0, 0, 0
    while True:
        while waiting and len(active) < replica.capacity:
            load = waiting[-1]
            need = load.context + load.remaining
            if active and reserved + need > replica.room:
                break
            waiting.pop()
            time += 0.0 if load.computed else cost.prefill(load.context)
            heappush(active, (now + load.remaining, len(started)))
            started.append((load, now))
            context, reserved = context + load.context, reserved + need
        if not active:
            break
        running = len(active)
        steps = int(min(active[0][0], max_steps)) - now
        time += cost.steps(steps, running, context)
        now, context = now + steps, context + running * steps
        if now < active[0][0]:
            break
        while active and active[0][0] <= now:
            load, _ = started[heappop(active)[1]]
            context -= load.context + load.remaining
            reserved -= load.context + load.remaining
    left = [
        replace(load, context=load.context + now - since, remaining=end - now, computed=True)
        for end, number in sorted(active, key=lambda entry: entry[1])
        for load, since in [started[number]]
    ]
    return Segment(time, now, (*left, *reversed(waiting)))


def next_steps(replicas: Sequence[Replica], cost: StepCost, interval: int, own: range) -> int:
    """Choose the steps of an engine until the next rebalance point, where all arrive together.

    The slowest replica runs ``interval`` steps, the others as many as they make in that time. A
    replica that is expected to finish earlier gets steps for the rest of the time as well, in case
    a response is longer than expected.

    Args:
        replicas: All replicas, in an order that is equal on all ranks.
        cost: Cost of their steps.
        interval: Steps of the slowest replica.
        own: Numbers of the replicas of the engine, which step together.
    """
    horizon = max(run_segment(replica, cost, interval).time for replica in replicas)
    return min(max(interval, _steps_within(replicas[i], cost, horizon)) for i in own)


def _steps_within(replica: Replica, cost: StepCost, time: float) -> int:
    """Return the decode steps of a replica in ``time``; at its end, steps of one sequence."""
    most = range(1, 1 + int(time / cost.decode(1)))
    steps = bisect_right(most, time, key=lambda n: run_segment(replica, cost, n).time)
    part = run_segment(replica, cost, steps)
    return steps if part.rest else part.steps + int((time - part.time) / cost.decode(1))


def plan_moves(
    replicas: Sequence[Replica], cost: StepCost, *, min_gain: float, running: bool
) -> Plan:
    """Plan moves that let the slowest replica end earlier.

    The slowest replica repeatedly gives requests to the fastest, as long as the later of the two
    ends earlier by the fraction ``min_gain`` of the remaining time. It gives requests that have not
    started, the last first, or, with ``running``, those with most tokens to come or the shortest
    contexts.

    Args:
        replicas: All replicas, in an order that is equal on all ranks.
        cost: Cost of their steps.
        min_gain: Fraction of the remaining time, above 0.
        running: Whether requests that have started may move as well.
    """
    state = list(replicas)
    times = [run_segment(replica, cost).time for replica in state]
    origin = {load.sample_id: i for i, r in enumerate(replicas) for load in r.loads}
    for _ in range(_CHANGES_PER_REPLICA * len(state)):
        slow = max(range(len(state)), key=lambda i: (times[i], -i))
        fast = min(range(len(state)), key=lambda i: (times[i], i))
        if times[slow] - times[fast] < min_gain * times[slow]:
            break
        found = _best_change(state[slow], state[fast], times[slow], cost, min_gain, running)
        if found is None:
            break
        state[slow], state[fast], times[slow], times[fast] = found
    moves = [
        Move(load.sample_id, origin[load.sample_id], i)
        for i, replica in enumerate(state)
        for load in replica.loads
        if origin[load.sample_id] != i
    ]
    return Plan(sorted(moves, key=lambda move: move.sample_id), state)


def _best_change(
    slow: Replica, fast: Replica, time: float, cost: StepCost, min_gain: float, running: bool
) -> tuple[Replica, Replica, float, float] | None:
    """Return both replicas after the change with the earliest end of the two, and their times.

    ``None`` where no change gains enough on ``time``, the time of the slow one. A started request
    certainly costs another prefill, while its length is an estimate: its gain must also exceed the
    error of a sum of as many estimates as the slow replica has requests.
    """
    best: tuple[Replica, Replica, float, float] | None = None
    doubt = _DOUBT / math.sqrt(max(1, len(slow.loads)))
    for chosen in _choices(slow.loads, running):
        ids = {load.sample_id for load in chosen}
        less = replace(slow, loads=tuple(load for load in slow.loads if load.sample_id not in ids))
        moved = tuple(replace(load, computed=False) for load in chosen)
        more = replace(fast, loads=(*fast.loads, *moved))
        times = run_segment(less, cost).time, run_segment(more, cost).time
        least = max(min_gain, doubt) if chosen[0].computed else min_gain
        if max(times) > (1 - least) * time:
            continue
        if best is None or max(times) < max(best[2:]):
            best = (less, more, *times)
    return best


def _choices(loads: Sequence[Load], running: bool) -> Iterator[tuple[Load, ...]]:
    """Yield batches of requests to give away: all, half, a quarter and so on of each order."""
    waiting = tuple(load for load in reversed(loads) if not load.computed)
    orders = [waiting]
    if running:
        active = [load for load in loads if load.computed]
        orders.append(tuple(sorted(active, key=lambda b: (-b.remaining, b.sample_id))))
        orders.append(tuple(sorted(active, key=lambda b: (b.context, b.sample_id))))
    for order in orders:
        count = len(order)
        while count:
            yield order[:count]
            count //= 2
