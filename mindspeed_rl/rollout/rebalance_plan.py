"""Which requests move between replicas of the engine while a rollout goes on.

Pure functions of what all ranks know, so every rank computes the same moves for itself. A request
moves as its tokens: the replica that takes it over reads the prompt and what was generated so far
in one prefill, and goes on. Whether that pays is a matter of :class:`StepCost`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

# Changes of the plan per replica that are looked for; each is a batch of requests.
_CHANGES_PER_REPLICA = 4
# Standard deviation of a length over its mean, on the safe side, where other lengths foretell it.
_DOUBT = 1.0


@dataclass(frozen=True, slots=True)
class StepCost:
    """Time of engine steps in units of reading the weights once: a roofline of decoding.

    Attributes:
        ridge_tokens: tokens that are computed in the time in which the weights are read: peak
            FLOPs over bytes per second, for 16-bit weights.
        context_tokens: cached tokens whose keys and values take as long to read as the weights.
        sizes: captured graph sizes, ascending; a batch is padded to the next one.
    """

    ridge_tokens: float
    context_tokens: float = math.inf
    sizes: tuple[int, ...] = ()

    def decode(self, running: int) -> float:
        """One decode step of ``running`` sequences without their contexts."""
        place = bisect_left(self.sizes, running)
        padded = self.sizes[place] if place < len(self.sizes) else running
        return max(1.0, padded / self.ridge_tokens)

    def steps(self, steps: int, running: int, context: int) -> float:
        """``steps`` decode steps of sequences with ``context`` tokens in all at their start."""
        read = steps * context + running * steps * (steps - 1) // 2
        return steps * self.decode(running) + read / self.context_tokens

    def prefill(self, tokens: int) -> float:
        """Reading ``tokens`` in one pass beside decode steps."""
        return tokens / self.ridge_tokens


@dataclass(frozen=True, slots=True)
class Load:
    """An unfinished request as the planner sees it.

    Attributes:
        sample_id: whose.
        context: tokens of the prompt and generated so far.
        remaining: tokens that are still to come, at least 1.
        computed: its context is in the cache of its replica.
    """

    sample_id: int
    context: int
    remaining: int
    computed: bool


@dataclass(frozen=True, slots=True)
class Replica:
    """What one replica has to do.

    Attributes:
        loads: in the order of their start, those that are computed first.
        capacity: sequences that run at once.
        room: tokens that its cache holds.
    """

    loads: tuple[Load, ...]
    capacity: int
    room: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of decode steps of one replica.

    Attributes:
        time: in the units of :class:`StepCost`.
        steps: decode steps.
        rest: what is not finished after it.
    """

    time: float
    steps: int
    rest: tuple[Load, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a settlement decides.

    Attributes:
        moves: at most one of each request, by sample id.
        replicas: after the moves.
    """

    moves: list[Move]
    replicas: list[Replica]


@dataclass(frozen=True, slots=True)
class Move:
    """A request leaves one replica for another."""

    sample_id: int
    source: int
    target: int


def run_segment(
    replica: Replica,
    cost: StepCost,
    max_steps: float = math.inf,
    max_time: float = math.inf,
) -> Segment:
    """Run a replica to its end, or for at most so many decode steps or so much time.

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
        if time + cost.steps(steps, running, context) > max_time:
            steps = _most_steps(steps, running, context, cost, max_time - time)
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


def _most_steps(most: int, running: int, context: int, cost: StepCost, time: float) -> int:
    """The largest number of steps below ``most`` that takes no more than ``time``."""
    least = 0
    while most - least > 1:
        middle = (least + most) // 2
        if cost.steps(middle, running, context) <= time:
            least = middle
        else:
            most = middle
    return least


def next_steps(replicas: Sequence[Replica], cost: StepCost, interval: int) -> list[int]:
    """Steps of each replica until the next settlement, so that all arrive there together.

    The slowest runs ``interval`` steps, the others as many as they make in that time; one that is
    expected to end before then goes on alone, in case a response is longer.
    """
    horizon = max((run_segment(r, cost, interval).time for r in replicas), default=0.0)
    found = []
    for replica in replicas:
        part = run_segment(replica, cost, max_time=horizon)
        alone = 0 if part.rest else int((horizon - part.time) / cost.decode(1))
        found.append(max(interval, part.steps + alone))
    return found


def plan_moves(
    replicas: Sequence[Replica], cost: StepCost, *, min_gain: float, running: bool
) -> Plan:
    """Moves that let the slowest replica end earlier.

    Again and again the slowest replica gives requests to the fastest, as long as the later of the
    two ends earlier by ``min_gain`` of what is left: those that have not begun, the last first, or,
    with ``running``, those with most to come, or with the shortest contexts.

    Args:
        replicas: all of them, in the order in which every rank knows them.
        cost: of their steps.
        min_gain: share of the remaining time, above 0.
        running: requests that have begun may move as well.
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
    """Both replicas after the change that lets the later of the two end first, and their times.

    ``None`` where no change gains enough on ``time``, that of the slow one. What has begun takes
    its prefill with it for certain, while its length is a guess: there the gain must also exceed
    the error of a sum of as many guesses as the slow replica has requests.
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
    """Batches of requests to give away: halves, quarters and so on of each order."""
    waiting = tuple(load for load in reversed(loads) if not load.computed)
    orders = [waiting]
    if running:
        prefix_tokens = [load for load in loads if load.computed]
        orders.append(tuple(sorted(prefix_tokens, key=lambda b: (-b.remaining, b.sample_id))))
        orders.append(tuple(sorted(prefix_tokens, key=lambda b: (b.context, b.sample_id))))
    for order in orders:
        count = len(order)
        while count:
            yield order[:count]
            count //= 2
