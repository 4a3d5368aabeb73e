"""Engines of gloo ranks that sample the same requests with drafts or without."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast
from unittest import mock

from support.rebalance_world import Shaker
from support.rollout_worlds import loaded_engine

from mindspeed_rl.core.types import Completion
from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.rollout import draft_costs
from mindspeed_rl.rollout.draft_costs import DraftPlan, DraftRule
from mindspeed_rl.rollout.draft_history import DraftHistory, prompt_key
from mindspeed_rl.rollout.requests import GenerationRequest, SamplingSettings, request_seed
from mindspeed_rl.rollout.stats import StepStats

SETTINGS = SamplingSettings(0.7, max_response_tokens=40, stop_token_ids=(1,))
GREEDY = SamplingSettings(0.0, max_response_tokens=40, stop_token_ids=(1,))
PROMPTS, SIBLINGS = 4, 3
# Seeds of each pass; those of the first come again, whose responses are known by then.
STEPS = (1, 2, 1)


@dataclass(frozen=True, slots=True)
class DraftRun:
    """What one rank sampled.

    Attributes:
        passes: completions of each pass: the steps, greedy, moved about, and of :func:`mixed`.
        stats: of each pass.
    """

    passes: list[dict[int, Completion]]
    stats: list[StepStats]


def requests_of(step: int) -> list[GenerationRequest]:
    """Ragged prompts and limits, with siblings."""
    return [
        GenerationRequest(
            i,
            tuple(5 + (7 * (i // SIBLINGS) + 3 * k) % 60 for k in range(2 + i // SIBLINGS)),
            request_seed(3, step, i),
            40 - 3 * (i % 5),
        )
        for i in range(PROMPTS * SIBLINGS)
    ]


@contextmanager
def planned(plans: str, rank: int) -> Iterator[None]:
    """Replace measured plans: drafts ``always``, or ``at random``, in other steps on each rank."""
    from mindspeed_rl.building import engine as build_engine

    draw = random.Random(rank)

    def plan(*_: object) -> DraftPlan:
        if plans == "always":
            return DraftPlan(1, 0.05, 0.0)
        return DraftPlan(draw.randrange(4), draw.random(), draw.random())

    period = 1 if plans == "always" else 3
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(draft_costs, "plan_drafts", plan))
        rule = partial(DraftRule, period=period)
        stack.enter_context(mock.patch.object(build_engine, "DraftRule", rule))
        yield


def mixed() -> list[GenerationRequest]:
    """Sampled requests and greedy ones in one call, as an evaluation within rollouts has them."""
    greedy = [
        replace(r, sample_id=PROMPTS * SIBLINGS + r.sample_id, temperature=0.0)
        for r in requests_of(4)
    ]
    return [*requests_of(2), *greedy]


def draft_world(
    world: World, model: str, flags: Sequence[str], plans: str, moves: bool = True
) -> DraftRun:
    """Rank function: three passes by temperature, a greedy one, and one whose requests move.

    Data-parallel ranks have every other prompt. ``plans`` are those of :func:`planned`; empty:
    there are no drafts.
    """
    with planned(plans, world.rank):
        return _sampled(world, model, flags, DraftHistory(2**20) if plans else None, moves)


def _sampled(
    world: World, model: str, flags: Sequence[str], history: DraftHistory | None, moves: bool
) -> DraftRun:
    flags = [*flags, *([] if history is None else ["--rollout-drafts", "history"])]
    job, engine = loaded_engine(world, model, flags, history)
    layout = job.plan.engine
    share = world.rank // layout.tp % layout.dp
    run = DraftRun([], [])

    def sample(
        wanted: Sequence[GenerationRequest],
        settings: SamplingSettings,
        mover: Shaker | None = None,
    ) -> None:
        engine.stats = StepStats()
        requests = [r for r in wanted if r.sample_id // SIBLINGS % layout.dp == share]
        done = engine.generate(requests, settings, 0, None, cast(Any, mover))
        run.passes.append(dict(sorted(done.items())))
        run.stats.append(engine.stats)
        if history is not None:
            for request in requests:
                tokens = done[request.sample_id].token_ids
                history.add(prompt_key(request.token_ids), tokens)

    for step in STEPS:
        sample(requests_of(step), SETTINGS)
    sample(requests_of(4), GREEDY)
    if moves:
        sample(requests_of(2), SETTINGS, Shaker(seeds=True))
    sample(mixed(), SETTINGS)
    sampled, greedy, together = run.passes[1], run.passes[3], run.passes[-1]
    for i, completion in together.items():
        alone = sampled[i] if i < PROMPTS * SIBLINGS else greedy[i - PROMPTS * SIBLINGS]
        assert completion.token_ids == alone.token_ids, i
    return run
