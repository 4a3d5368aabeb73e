"""Engines of gloo ranks that sample the same requests with drafts or without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from support.rebalance_world import Shaker
from support.rollout_worlds import loaded_engine

from mindspeed_rl.core.types import Completion
from mindspeed_rl.launch.bootstrap import World
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
        passes: completions of each pass: the steps, then greedy, then moved about.
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


def draft_world(world: World, model: str, flags: Sequence[str], drafts: bool) -> DraftRun:
    """Rank function: three passes by temperature, a greedy one, and one whose requests move."""
    history = DraftHistory(2**20) if drafts else None
    flags = [*flags, *(["--rollout-drafts", "history"] if drafts else [])]
    _, engine = loaded_engine(world, model, flags, history)
    run = DraftRun([], [])

    def sample(step: int, settings: SamplingSettings, mover: Shaker | None = None) -> None:
        engine.stats = StepStats()
        requests = requests_of(step)
        done = engine.generate(requests, settings, 0, None, cast(Any, mover))
        run.passes.append(dict(sorted(done.items())))
        run.stats.append(engine.stats)
        if history is not None:
            for request in requests:
                tokens = done[request.sample_id].token_ids
                history.add(prompt_key(request.token_ids), tokens)

    for step in STEPS:
        sample(step, SETTINGS)
    sample(4, GREEDY)
    sample(2, SETTINGS, Shaker(seeds=True))
    return run
