"""What ranks sample with vLLM-Ascend's real engine on emulated NPUs: bodies of tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest import mock

from ascend.emulator.census import Call, counting
from ascend.engine_worlds import PROMPTS, SETTINGS, Sampled, build, load, sample

from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.rollout import draft_costs
from mindspeed_rl.rollout.draft_costs import DraftPlan
from mindspeed_rl.rollout.draft_history import DraftHistory, prompt_key
from mindspeed_rl.rollout.requests import GenerationRequest
from mindspeed_rl.rollout.stats import StepStats

# As many tokens as a step reads of prompts: less than all of PROMPTS, not less than one of them.
ROOM = 8


def read_in_parts(world: World, folder: str, ours: bool) -> tuple[Sampled, Sampled]:
    """What is sampled of all prompts at once, where a step reads a part of one, and of each alone.

    Without ``ours`` the sampler draws as vLLM-Ascend's own does.
    """
    if not ours:
        _keep_its_sampler()
    engine = build(folder, "float32", EngineLayout(1, 1), world.rank, ROOM)
    load(engine, folder, 1)
    together = sample(engine, 1, range(len(PROMPTS)))
    alone: dict[int, Any] = {}
    for i in range(len(PROMPTS)):
        alone |= sample(engine, 1, [i])
    return together, alone


def operators_of_a_step(
    world: World, folder: str, batches: Sequence[int], ours: bool
) -> list[Counter[Call]]:
    """The operators of a decode step, for some numbers of requests."""
    if not ours:
        _keep_its_sampler()
    engine = build(folder, "float32", EngineLayout(1, 1), world.rank)
    load(engine, folder, 1)
    found = []
    for size in batches:
        asked = [GenerationRequest(i, PROMPTS[i % 4], 100 + i) for i in range(size)]
        steps: list[Counter[Call]] = []
        with counting() as counts:
            # The first step reads prompts, and is followed by others that are equal.
            engine.generate(asked, SETTINGS, 1, lambda _: steps.append(Counter(counts)))  # noqa: B023
        assert steps[2] - steps[1] == steps[3] - steps[2]
        found.append(steps[2] - steps[1])
    return found


def twice(
    world: World, folder: str, drafts: bool, room: int, dtype: str = "float32"
) -> tuple[list[Sampled], list[StepStats]]:
    """What is sampled of all prompts in two passes with the same seeds, and the steps of each.

    With ``drafts`` they are sought after every step, in the second pass from the first one's
    responses. A step has up to ``room`` tokens.
    """
    history = DraftHistory(2**20) if drafts else None
    with mock.patch.object(draft_costs, "plan_drafts", lambda *_: DraftPlan(1, 0.05, 0.0)):
        engine = build(folder, dtype, EngineLayout(1, 1), world.rank, room, history=history)
        load(engine, folder, 1)
        passes, stats = [], []
        for _ in range(2):
            engine.stats = StepStats()
            passes.append(sample(engine, 1, range(len(PROMPTS))))
            stats.append(engine.stats)
            for i, (tokens, _) in passes[-1].items() if history is not None else ():
                history.add(prompt_key(PROMPTS[i]), tokens)
    return passes, stats


def _keep_its_sampler() -> None:
    from mindspeed_rl.engines.vllm_ascend import sampling

    sampling.apply_patch = lambda patch: None
