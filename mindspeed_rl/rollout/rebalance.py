"""Moves requests between the engines of a run while they generate.

Now and then all engines settle: each tells how far its requests are, every rank computes the same
moves (:mod:`~mindspeed_rl.rollout.rebalance_plan`), and what leaves one engine arrives in another
as tokens, log-probs and the state of its random stream. Between two settlements engines are
independent, for as many steps as each makes in the same time; one that has nothing left waits.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from mindspeed_rl.parallel.conversations import all_gather_pairs
from mindspeed_rl.rollout.engine import GenerationRequest
from mindspeed_rl.rollout.open_requests import OpenRequests, Parcel, Progress
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

_NONE = -1


@dataclass(frozen=True, slots=True)
class Rules:
    """What is moved when; equal on all ranks.

    Attributes:
        interval: steps of the slowest engine between settlements.
        groups_per_engine: groups with requests of their own that step together.
        running: requests that have begun move as well.
        min_gain: see :func:`~mindspeed_rl.rollout.rebalance_plan.plan_moves`.
        cost: of engine steps.
        capacity: sequences that run at once on an engine.
        room: tokens in the cache of an engine.
    """

    interval: int
    groups_per_engine: int
    running: bool
    min_gain: float
    cost: StepCost
    capacity: int
    room: int


class Rebalancer:
    """One rollout's settlements on this rank.

    Args:
        rules: what is moved when.
        group: of this rank among those with prompts of their own.
        leads: this rank speaks for its group.
        expected: (sample id, tokens so far) -> expected length of the response; equal on all ranks.

    Attributes:
        steps: of this rank's engine until the next settlement.
    """

    def __init__(
        self, rules: Rules, group: int, leads: bool, expected: Callable[[int, int], int]
    ) -> None:
        self.rules = rules
        self._group = group
        self._leads = leads
        self._expected = expected
        self.steps = rules.interval

    def settle(self, requests: OpenRequests, stats: StepStats) -> bool:
        """Exchange requests with the other engines. Collective: the world.

        Returns:
            Whether any engine has a request left.
        """
        start = time.perf_counter()
        report = pack_progress(requests.progress()) if self._leads else _NOTHING
        groups = [unpack_progress(part) for part, _ in all_gather_pairs(report, _NO_FLOATS)
                  if part.numel()]  # fmt: skip
        plan = self.plan(groups)
        self.steps = self.steps_after(plan)
        if moves := plan.moves:
            parcels = self.take(requests, moves, stats)
            mine = pack_parcels(parcels if self._leads else [])
            arrived = [p for pair in all_gather_pairs(*mine) for p in unpack_parcels(*pair)]
            self.deliver(requests, arrived, moves)
        stats.settlements += 1
        stats.settle_seconds += time.perf_counter() - start
        return any(groups)

    def plan(self, groups: Sequence[Sequence[Progress]]) -> Plan:
        """The moves between groups; the same on all ranks. Local."""
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
        """Steps of this rank's engine until the next settlement. Local."""
        size = self.rules.groups_per_engine
        first = self._group // size * size
        steps = next_steps(plan.replicas, self.rules.cost, self.rules.interval)
        return min(steps[first : first + size])

    def take(self, requests: OpenRequests, moves: Sequence[Move], stats: StepStats) -> list[Parcel]:
        """What leaves this rank. Local; alike on the ranks of an engine."""
        leaving = [move.sample_id for move in moves if move.source == self._group]
        parcels = requests.take(leaving)
        stats.moved += len(parcels)
        stats.moved_tokens += sum(len(p.request.token_ids) + len(p.token_ids) for p in parcels)
        return parcels

    def deliver(
        self, requests: OpenRequests, parcels: Iterable[Parcel], moves: Sequence[Move]
    ) -> None:
        """Of all parcels, add those for this rank. Local.

        Raises:
            RuntimeError: one that was to come is missing.
        """
        awaited = {move.sample_id for move in moves if move.target == self._group}
        mine = [p for p in parcels if p.request.sample_id in awaited]
        if missing := awaited - {p.request.sample_id for p in mine}:
            raise RuntimeError(f"rebalance: samples {sorted(missing)[:8]} did not arrive")
        requests.add(sorted(mine, key=lambda p: p.request.sample_id))


_NOTHING = torch.zeros(0, dtype=torch.int64)
_NO_FLOATS = torch.zeros(0)


def pack_progress(progress: Sequence[Progress]) -> torch.Tensor:
    """[1 + 4 n] int64: how many, then a row of each."""
    rows = [len(progress)]
    for p in progress:
        rows += (p.sample_id, p.context, p.generated, int(p.computed))
    return torch.tensor(rows, dtype=torch.int64)


def unpack_progress(rows: torch.Tensor) -> list[Progress]:
    """The inverse of :func:`pack_progress`."""
    return [Progress(i, context, generated, bool(computed))
            for i, context, generated, computed in rows[1:].view(-1, 4).tolist()]  # fmt: skip


def pack_parcels(parcels: Sequence[Parcel]) -> tuple[torch.Tensor, torch.Tensor]:
    """Flatten to one int64 and one fp32 tensor. Local."""
    integers: list[int] = []
    logprobs: list[float] = []
    for p in parcels:
        request = p.request
        stream = [] if p.stream is None else _words(p.stream)
        limit = _NONE if request.max_tokens is None else request.max_tokens
        num_bytes = _NONE if p.stream is None else p.stream.numel()
        integers += (request.sample_id, request.seed, limit, num_bytes)
        integers += (len(request.token_ids), len(p.token_ids))
        integers += (*request.token_ids, *p.token_ids, *stream)
        logprobs += p.logprobs
    return torch.tensor(integers, dtype=torch.int64), torch.tensor(logprobs, dtype=torch.float32)


def unpack_parcels(integers: torch.Tensor, floats: torch.Tensor) -> list[Parcel]:
    """The inverse of :func:`pack_parcels`. Local."""
    values, logprobs = integers.tolist(), floats.tolist()
    found, at, log = [], 0, 0
    while at < len(values):
        sample_id, seed, limit, num_bytes, prompt, done = values[at : at + 6]
        at += 6
        ids, tokens = values[at : at + prompt], values[at + prompt : at + prompt + done]
        at += prompt + done
        stream = None
        if num_bytes != _NONE:
            count = -(-num_bytes // 8)
            stream = _bytes(values[at : at + count], num_bytes)
            at += count
        request = GenerationRequest(sample_id, tuple(ids), seed, None if limit < 0 else limit)
        found.append(Parcel(request, tuple(tokens), tuple(logprobs[log : log + done]), stream))
        log += done
    return found


def _words(stream: torch.Tensor) -> list[int]:
    """uint8 -> int64, padded with zeros."""
    raw = bytes(stream.tolist())
    raw += bytes(-len(raw) % 8)
    return list(struct.unpack(f"<{len(raw) // 8}q", raw))


def _bytes(words: Sequence[int], num_bytes: int) -> torch.Tensor:
    raw = struct.pack(f"<{len(words)}q", *words)[:num_bytes]
    return torch.tensor(list(raw), dtype=torch.uint8)
