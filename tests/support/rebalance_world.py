"""Engines of gloo ranks with a skewed set of requests, left alone and rebalanced."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

from support.rollout_worlds import loaded_engine

from mindspeed_rl.core.types import Completion
from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.rollout.open_requests import OpenRequests
from mindspeed_rl.rollout.rebalance import Rebalancer, RebalanceRules
from mindspeed_rl.rollout.rebalance_plan import StepCost
from mindspeed_rl.rollout.requests import GenerationRequest, SamplingSettings, request_seed
from mindspeed_rl.rollout.stats import StepStats

COUNTS = (20, 2)
CAPACITY = 8
SETTINGS = SamplingSettings(1.0, max_response_tokens=48, stop_token_ids=(1,))
MODES = ("off", "waiting", "all")


class Shaker:
    """In place of a rebalancer: stops requests of this engine and adds them again, at random.

    Args:
        seeds: whether they keep their seeds.

    Attributes:
        num_running_moved: stopped requests that had tokens.
    """

    rules = SimpleNamespace(running=True)
    steps = 3

    def __init__(self, seeds: bool) -> None:
        self._seeds = seeds
        self._draw = random.Random(1)
        self.num_running_moved = 0

    def rebalance_point(self, requests: OpenRequests, stats: StepStats) -> bool:
        """Half of the requests. Local."""
        loads = requests.loads(lambda _, done: done)
        chosen = [load for load in loads if self._draw.random() < 0.5]
        self.num_running_moved += sum(load.computed for load in chosen)
        taken = requests.take([load.sample_id for load in chosen])
        requests.add(r if self._seeds else replace(r, seed=r.seed + 1) for r in taken)
        return len(requests) > 0


@dataclass(frozen=True, slots=True)
class Run:
    """One rollout on one rank.

    Attributes:
        completions: that ended here.
        stats: what was stepped and moved.
        num_running_moved: of a :class:`Shaker`.
    """

    completions: dict[int, Completion]
    stats: StepStats
    num_running_moved: int = 0


def requests_of(group: int) -> list[GenerationRequest]:
    """Ragged prompts and limits; most, and the longest, begin on the first engine."""
    first = sum(COUNTS[:group])
    result = []
    for i in range(first, first + COUNTS[group]):
        limit = 48 if i % 3 == 0 and not group else 6 + i % 5
        prompt = tuple(5 + (7 * i + k) % 300 for k in range(2 + i % 6))
        result.append(GenerationRequest(i, prompt, request_seed(3, 1, i), limit))
    return result


def rebalance_world(world: World, model: str, flags: Sequence[str]) -> dict[str, Run]:
    """Rank function: the same requests in every mode, and once the last of them first."""
    job, engine = loaded_engine(world, model, ["--vllm-max-num-seqs", str(CAPACITY), *flags])
    layout = job.plan.engine
    group = layout.group_of(world.rank)
    runs = {}
    for mode in MODES:
        rules = RebalanceRules(
            4, layout.dp, mode == "all", 0.02, StepCost(1000.0, 100.0), engine.max_num_seqs, 10**6
        )
        rebalancer = Rebalancer(
            rules, group, layout.tp_rank(world.rank) == 0, lambda _, done: done + 16
        )
        engine.stats = StepStats()
        done = engine.generate(
            requests_of(group), SETTINGS, 0, None, None if mode == "off" else rebalancer
        )
        runs[mode] = Run(done, engine.stats)
    engine.stats = StepStats()
    done = engine.generate(list(reversed(requests_of(group))), SETTINGS, 0)
    runs["last first"] = Run(done, engine.stats)
    for name, seeds in (("shaken", True), ("shaken with other seeds", False)):
        shaker, engine.stats = Shaker(seeds), StepStats()
        done = engine.generate(requests_of(group), SETTINGS, 0, None, cast(Any, shaker))
        runs[name] = Run(done, engine.stats, shaker.num_running_moved)
    return runs
