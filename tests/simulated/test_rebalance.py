"""Requests that move between engines of one process: nothing is lost, doubled or changed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mindspeed_rl.core.types import Completion
from mindspeed_rl.rollout.open_requests import OpenRequests
from mindspeed_rl.rollout.rebalance import Rebalancer, RebalanceRules
from mindspeed_rl.rollout.rebalance_plan import (
    Load,
    Move,
    Replica,
    StepCost,
    next_steps,
    plan_moves,
    run_segment,
)
from mindspeed_rl.rollout.requests import GenerationRequest
from mindspeed_rl.rollout.stats import StepStats
from mindspeed_rl.rollout.step_loop import run_steps

VERSION = 3
COST = StepCost(ridge_tokens=64)


class SeededEngine:
    """An engine whose next token follows from all tokens before it, their number and the seed."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self.dp_group = capacity, None
        self._requests: dict[str, SimpleNamespace] = {}

    def add(
        self,
        key: str,
        token_ids: list[int],
        seed: int,
        max_tokens: int,
        temperature: float | None,
        *,
        watched: bool,
    ) -> str:
        assert key not in self._requests, "a request is here twice"
        self._requests[key] = SimpleNamespace(
            ids=list(token_ids), new=[], logprobs=[], left=max_tokens, seed=seed
        )
        return key

    def abort(self, keys: list[str]) -> None:
        for key in keys:
            del self._requests[key]

    def get_num_unfinished_requests(self) -> int:
        return len(self._requests)

    def step(self) -> list[Any]:
        outputs = []
        for key, r in list(self._requests.items())[: self._capacity]:
            noise = random.Random(f"{r.seed} {len(r.ids)}").randrange(1000)
            token = (sum(r.ids) * 31 + noise) % 997
            r.ids.append(token)
            r.new.append(token)
            r.logprobs.append(-noise / 7)
            r.left -= 1
            stopped = token % 97 == 0
            finished = stopped or not r.left
            reason = ("stop" if stopped else "length") if finished else None
            flat = SimpleNamespace(token_ids=list(r.new), logprobs=list(r.logprobs))
            output = SimpleNamespace(token_ids=list(r.new), logprobs=flat, finish_reason=reason)
            outputs.append(SimpleNamespace(request_id=key, finished=finished, outputs=[output]))
            if finished:
                del self._requests[key]
        return outputs


class World:
    """Engines of one process that exchange requests by the product's plans.

    Args:
        shares: what each begins with.
        rules: of all.
        whims: moves requests at random instead of by plan.
    """

    def __init__(
        self,
        shares: Sequence[Sequence[GenerationRequest]],
        rules: RebalanceRules,
        whims: random.Random | None = None,
    ) -> None:
        self.whims = whims
        self.engines = [SeededEngine(rules.capacity) for _ in shares]
        self.open = [OpenRequests(engine, 1) for engine in self.engines]
        self.stats = [StepStats() for _ in shares]
        self.sides = [Rebalancer(rules, i, True, lambda _, done: 2 * done + 4)
                      for i in range(len(shares))]  # fmt: skip
        for requests, share in zip(self.open, shares, strict=True):
            requests.add(share)

    def run(self) -> dict[int, Completion]:
        """All completions; one that is there twice is an error."""
        done: dict[int, Completion] = {}
        while any(map(len, self.open)):
            for engine, requests, stats, side in zip(
                self.engines, self.open, self.stats, self.sides, strict=True
            ):
                for outputs in run_steps(engine, None, 1, stats, side.steps):
                    requests.note(outputs)
                    ended = {int(o.request_id): o for o in outputs if o.finished}
                    found = requests.finish(ended, VERSION)
                    assert not found.keys() & done.keys()
                    done |= found
            self.rebalance_point()
        return done

    def random_moves(self, groups: Sequence[Sequence[Load]], whims: random.Random) -> list[Move]:
        found = []
        for source, loads in enumerate(groups):
            targets = [i for i in range(len(groups)) if i != source]
            for one in loads:
                if whims.random() < 0.4:
                    found.append(Move(one.sample_id, source, whims.choice(targets)))
        return found

    def rebalance_point(self) -> None:
        groups = [
            requests.loads(side.expected)
            for requests, side in zip(self.open, self.sides, strict=True)
        ]
        plans = [side.plan(groups) for side in self.sides]
        assert all(plan == plans[0] for plan in plans)
        moves = plans[0].moves if self.whims is None else self.random_moves(groups, self.whims)
        for side in self.sides:
            side.steps = side.steps_after(plans[0])
        arrived = [
            request
            for side, requests, stats in zip(self.sides, self.open, self.stats, strict=True)
            for request in side.take(requests, moves, stats)
        ]
        for side, requests in zip(self.sides, self.open, strict=True):
            side.deliver(requests, arrived, moves)


def shares_of(counts: Sequence[int], seed: int) -> list[list[GenerationRequest]]:
    """Requests with limits of their own; those of the first engine are the longest."""
    draw, number, shares = random.Random(seed), 0, []
    for engine, count in enumerate(counts):
        share = []
        for _ in range(count):
            limit = draw.randint(1, 12 if engine else 60)
            prompt = tuple(draw.randint(0, 9) for _ in range(draw.randint(1, 4)))
            share.append(GenerationRequest(number, prompt, draw.getrandbits(62), limit))
            number += 1
        shares.append(share)
    return shares


def rules(interval: int, *, running: bool = True, capacity: int = 3) -> RebalanceRules:
    return RebalanceRules(interval, 1, running, 0.01, COST, capacity, 10**6)


@given(
    st.lists(st.integers(0, 8), min_size=2, max_size=4),
    st.integers(1, 9),
    st.sampled_from(["planned", "random"]),
    st.integers(0, 10**6),
)
@settings(deadline=None, max_examples=60)
@example([6, 5], 3, "random", 1)
def test_nothing_is_lost_doubled_or_changed(
    counts: list[int], interval: int, moves: str, seed: int
) -> None:
    """Tokens, log-probs and finish reasons are those of engines that are left alone.

    Whatever moves, begun or not, as often as it likes.
    """
    shares = shares_of(counts, seed)
    still = World(shares, rules(10**9))
    wanted = still.run()
    whims = random.Random(seed) if moves == "random" else None
    moved = World(shares, rules(interval), whims)
    found = moved.run()
    assert set(found) == set(range(sum(counts)))
    for sample_id, completion in wanted.items():
        other = found[sample_id]
        assert other.token_ids == completion.token_ids
        assert other.logprobs == completion.logprobs
        assert other.finish_reason == completion.finish_reason
    assert not any(s.moved for s in still.stats)


def test_a_skewed_set_takes_fewer_steps() -> None:
    """All long requests begin on the first of three engines."""
    shares = shares_of([12, 2, 2], 5)
    steps, moved = {}, {}
    for name, world_rules in (
        ("off", rules(10**9)),
        ("waiting", rules(4, running=False)),
        ("all", rules(4)),
    ):
        world = World(shares, world_rules)
        world.run()
        steps[name] = max(s.steps for s in world.stats)
        moved[name] = sum(s.moved for s in world.stats)
    assert moved["off"] == 0 < moved["waiting"] <= moved["all"]
    assert steps["all"] <= steps["waiting"] < 0.6 * steps["off"], steps


def test_an_open_request_that_does_not_arrive_is_named() -> None:
    world = World(shares_of([4, 0], 1), rules(2))
    moves = [Move(2, 0, 1)]
    with pytest.raises(RuntimeError, match=r"samples \[2\] did not arrive"):
        world.sides[1].deliver(world.open[1], [], moves)


# --- the plan ----------------------------------------------------------------------------------


def load(number: int, remaining: int, *, context: int = 10, computed: bool = True) -> Load:
    return Load(number, context, remaining, computed)


def test_a_segment_by_hand() -> None:
    """Two places: 3 and 5 tokens run, 4 more start after 3; contexts are read in every step."""
    cost = StepCost(ridge_tokens=10, context_tokens=1000)
    loads = (load(0, 3), load(1, 5), load(2, 4, context=20, computed=False))
    whole = run_segment(Replica(loads, 2, 10**6), cost)
    assert whole.steps == 7 and whole.rest == ()
    contexts = [20, 22, 24, 13 + 20, 14 + 21, 22, 23]  # of what runs in each step
    assert whole.time == pytest.approx(7 + 20 / 10 + sum(contexts) / 1000)
    part = run_segment(Replica(loads, 2, 10**6), cost, 4)
    assert part.rest == (load(1, 1, context=14), load(2, 3, context=21))
    rest = run_segment(Replica(part.rest, 2, 10**6), cost)
    assert part.time + rest.time == pytest.approx(whole.time) and part.steps + rest.steps == 7


def test_a_cache_that_is_full_lets_requests_wait() -> None:
    loads = (load(0, 5), load(1, 5), load(2, 5))
    assert run_segment(Replica(loads, 3, 10**6), COST).steps == 5
    assert run_segment(Replica(loads, 3, 30), COST).steps == 10
    assert run_segment(Replica(loads, 3, 1), COST).steps == 15, "one always runs"


def test_padding_and_width_cost_time() -> None:
    cost = StepCost(ridge_tokens=8, sizes=(4, 16))
    assert [cost.decode(n) for n in (1, 4, 5, 16, 32)] == [1.0, 1.0, 2.0, 2.0, 4.0]
    assert cost.prefill(24) == 3.0


def test_a_move_must_gain_more_than_its_prefill_costs() -> None:
    """Half of 8 sequences would leave a replica at its ridge: 100 steps each save half."""
    cost = StepCost(ridge_tokens=4)
    slow = [load(i, 100, context=20) for i in range(8)]
    cheap = [Replica(tuple(slow), 8, 10**9), Replica((), 8, 10**9)]
    moves = plan_moves(cheap, cost, min_gain=0.05, running=True).moves
    assert len(moves) == 4 and {(m.source, m.target) for m in moves} == {(0, 1)}
    dear = [Replica(tuple(load(i, 100, context=400) for i in range(8)), 8, 10**9), cheap[1]]
    assert plan_moves(dear, cost, min_gain=0.05, running=True).moves == []
    assert plan_moves(cheap, cost, min_gain=0.05, running=False).moves == []


def test_a_smaller_captured_batch_is_a_gain_that_its_prefill_must_not_eat() -> None:
    """Ten and six running requests: with graphs of 8 and 16 two moves halve the slower steps.

    By hand, with 100 tokens to come each: 10 padded to 16 over a ridge of 4 are 4 per step, 8 are
    2, so 400 become 200 on one engine, and 200 and the prefill of 20 and 21 tokens on the other.
    """

    def replicas(context: int) -> list[Replica]:
        slow = [Load(i, context + 9 - i, 100, computed=True) for i in range(10)]
        fast = [Load(30 + i, 7 + i, 100, computed=True) for i in range(6)]
        return [Replica(tuple(loads), 16, 10**6) for loads in (slow, fast)]

    graphs, exact = StepCost(4, sizes=(8, 16)), StepCost(4)
    plan = plan_moves(replicas(20), graphs, min_gain=0.05, running=True)
    assert plan.moves == [Move(8, 0, 1), Move(9, 0, 1)], "the two with the shortest contexts"
    assert [run_segment(replica, graphs).time for replica in plan.replicas] == [200, 210.25]
    # Without graphs the same two moves shorten 250 to 210.25: less than the lengths are uncertain.
    assert plan_moves(replicas(20), exact, min_gain=0.05, running=True).moves == []
    # Two prefills of 400 tokens cost the 200 that the smaller batch saves.
    assert plan_moves(replicas(400), graphs, min_gain=0.05, running=True).moves == []


def test_nothing_moves_between_equals() -> None:
    replicas = [Replica((load(i, 50), load(i + 9, 70, computed=False)), 1, 10**9) for i in range(3)]
    assert plan_moves(replicas, COST, min_gain=0.01, running=True).moves == []
    assert plan_moves([Replica((), 1, 1)] * 2, COST, min_gain=0.01, running=True).moves == []


@given(
    st.lists(st.lists(st.integers(1, 300), max_size=12), min_size=2, max_size=6),
    st.integers(1, 8),
    st.booleans(),
)
@settings(deadline=None, max_examples=80)
def test_a_plan_never_makes_it_slower(
    lengths: list[list[int]], capacity: int, running: bool
) -> None:
    """By its own model; each request moves at most once, from where it is to somewhere else."""
    number, replicas = 0, []
    for row in lengths:
        loads = []
        for position, remaining in enumerate(row):
            loads.append(load(number, remaining, computed=position < capacity))
            number += 1
        replicas.append(Replica(tuple(loads), capacity, 10**9))
    moves = plan_moves(replicas, COST, min_gain=0.02, running=running).moves
    where = {one.sample_id: (i, one) for i, r in enumerate(replicas) for one in r.loads}
    assert len({m.sample_id for m in moves}) == len(moves)
    after = [{one.sample_id: one for one in r.loads} for r in replicas]
    for move in moves:
        source, taken = where[move.sample_id]
        assert move.source == source != move.target
        assert running or not taken.computed
        del after[source][move.sample_id]
        after[move.target][move.sample_id] = load(
            move.sample_id, taken.remaining, context=taken.context, computed=False
        )
    times = [run_segment(r, COST).time for r in replicas]
    moved = [
        run_segment(Replica(tuple(loads.values()), capacity, 10**9), COST).time for loads in after
    ]
    assert max(moved) <= max(times)


def test_engines_reach_a_rebalance_point_at_the_same_time() -> None:
    """The slowest runs the interval; one with half of the contexts makes more steps meanwhile."""
    cost = StepCost(ridge_tokens=1000, context_tokens=500)
    slow, quick = (
        Replica(tuple(load(10 * i + k, 400, context=100) for k in range(n)), 9, 10**9)
        for i, n in enumerate((8, 4))
    )
    done = Replica((), 9, 10**9)
    replicas = [slow, quick, done]
    steps = [next_steps(replicas, cost, 20, range(i, i + 1)) for i in range(3)]
    assert steps[0] == 20 < steps[1] < 40 < steps[2]
    times = [run_segment(r, cost, n).time for r, n in zip((slow, quick), steps, strict=False)]
    assert times[1] == pytest.approx(times[0], rel=0.05) and times[1] <= times[0]
    assert next_steps(replicas, cost, 20, range(1, 3)) == steps[1], "an engine steps as one"
    assert next_steps([done], cost, 20, range(1)) == 20
