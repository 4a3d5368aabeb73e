"""Conversations of a real engine with environments that answer at their own time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

from support.rollout_worlds import loaded_engine

from mindspeed_rl.core.types import Prompt, Rollout
from mindspeed_rl.environments import LocalRunner, Observation
from mindspeed_rl.generation.multi_turn import Environments, run_conversations
from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.rollout.requests import SamplingSettings, request_seed

NUM_PROMPTS, TURNS = 6, 3
SETTINGS = SamplingSettings(0.7, max_response_tokens=40, stop_token_ids=tuple(range(1, 90)))


class Talker:
    """Answers with the number of the turn and the prompt's, the later the larger that is."""

    def __init__(self, tokenizer: object) -> None:
        self._turn = 0

    def reset(self, prompt: Prompt) -> Observation:
        self._index = prompt.index
        return Observation((100 + prompt.index,) if prompt.index % 2 else ())

    def step(self, token_ids: tuple[int, ...]) -> Observation:
        time.sleep(0.03 * self._index)
        self._turn += 1
        return Observation((100 + self._turn, 110 + self._index), reward=float(self._turn))


class Heard:
    """Collects the samples of conversations."""

    def __init__(self) -> None:
        self.samples: dict[int, tuple[tuple[int, ...], tuple[bool, ...], float | None]] = {}

    def add(self, rollout: Rollout, reward: float | None = None) -> None:
        completion = rollout.completion
        mask = cast(Any, completion.loss_mask)
        self.samples[rollout.sample_id] = (completion.token_ids, tuple(mask), reward)


def conversation_world(
    world: World, model: str, flags: Sequence[str], agreements: Sequence[str]
) -> list[dict[int, Any]]:
    """Rank function: the samples of this rank's engine group, once with each agreement of ranks.

    An agreement is ``packed`` for our reduction, or ``engine``.
    """
    from mindspeed_rl.engines.vllm.patches import step_sync

    job, engine = loaded_engine(world, model, ["--vllm-max-num-seqs", "16", *flags])
    layout = job.plan.engine
    share = world.rank // layout.tp
    prompts = {
        i: Prompt(i, tuple(range(3, 6 + i)), "", "")
        for i in range(NUM_PROMPTS)
        if i % (world.size // layout.tp) == share
    }
    found = []
    for agreement in agreements:
        engine._agreement = step_sync.apply(job.platform.name) if agreement == "packed" else None
        environments = Environments(LocalRunner(Talker, cast(Any, None), 2), "talker", TURNS, 0.0)
        heard = Heard()
        metrics = run_conversations(
            environments if world.rank % layout.tp == 0 else None,
            prompts,
            engine,
            SETTINGS,
            0,
            lambda sample, turn: request_seed(5, 1, sample, 0, turn),
            cast(Any, heard),
        )
        assert "environment/turns" in metrics
        environments.runner.close()
        found.append(heard.samples)
    return found
