"""Which engine generates what: the same requests in every layout."""

from __future__ import annotations

from typing import Any, cast

import pytest
from support.table_engine import TableEngine, response_of

from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.core.types import Prompt
from mindspeed_rl.generation.assignment import EngineAssignment
from mindspeed_rl.generation.rollout_worker import PassRequest, RolloutWorker
from mindspeed_rl.rollout.requests import GenerationRequest, SamplingSettings

SETTINGS = SamplingSettings(temperature=1.0, max_response_tokens=4, stop_token_ids=(1,))
PROMPTS = [Prompt(i, (i + 1, 2), str(i), "") for i in range(13)]


def requests_of(layout: EngineLayout, rank: int) -> list[GenerationRequest]:
    engine, none = TableEngine(), cast(Any, None)
    engine.finish_update(6)
    worker = RolloutWorker(
        engine=cast(Any, engine),
        assignment=EngineAssignment(layout, rank, limit=4),
        rewards=none,
        cache=none,
        columns=(),
        seed=99,
        stop_token_ids=(1,),
    )
    rollouts = worker.generate(PassRequest(PROMPTS, 3, SETTINGS, 6))
    ((requests, _),) = engine.asked
    assert [r.sample_id for r in rollouts] == [r.sample_id for r in requests]
    for rollout in rollouts:
        assert rollout.prompt is PROMPTS[rollout.sample_id]
        assert rollout.completion.token_ids == response_of(rollout.sample_id)
    return requests


@pytest.mark.parametrize(("world", "tp"), [(2, 1), (3, 1), (8, 2), (16, 1)])
def test_requests_do_not_depend_on_the_layout(world: int, tp: int) -> None:
    """Prompt and seed of every sample are those of a single engine, also when some get none."""
    alone = requests_of(EngineLayout(1, 1), 0)
    layout = EngineLayout(world, tp)
    spread = [r for rank in range(0, world, tp) for r in requests_of(layout, rank)]
    assert spread == alone
    assert len({r.seed for r in alone}) == len(PROMPTS)


def test_ranks_of_an_engine_make_the_same_requests() -> None:
    layout = EngineLayout(8, 4)
    assert requests_of(layout, 4) == requests_of(layout, 7)
