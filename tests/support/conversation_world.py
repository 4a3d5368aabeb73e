"""Conversations of a real engine with environments that answer at their own time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

from support.draft_world import planned
from support.rollout_worlds import loaded_engine

from mindspeed_rl.core.types import Prompt, Rollout
from mindspeed_rl.environments import LocalRunner, Observation
from mindspeed_rl.generation.multi_turn import Environments, run_conversations
from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.parallel.small_collectives import gather_objects
from mindspeed_rl.rollout.draft_history import DraftHistory, prompt_key
from mindspeed_rl.rollout.rebalance import Rebalancer, RebalanceRules, Visits
from mindspeed_rl.rollout.rebalance_plan import Load, Move, Plan, StepCost
from mindspeed_rl.rollout.requests import SamplingSettings, request_seed
from mindspeed_rl.rollout.stats import StepStats

NUM_PROMPTS, TURNS = 6, 3
SETTINGS = SamplingSettings(0.7, max_response_tokens=40, stop_token_ids=tuple(range(1, 90)))


class Restless(Rebalancer):
    """Moves half of the turns, whatever that costs, at every point."""

    def plan(self, groups: Sequence[Sequence[Load]]) -> Plan:
        loads = [load for group in groups for load in group]
        planned = super().plan(groups)
        source = {load.sample_id: g for g, group in enumerate(groups) for load in group}
        chosen = sorted(source)[:: 2 if len(loads) > 1 else 1]
        return replace(planned, moves=[Move(i, source[i], 1 - source[i]) for i in chosen])


def restless(layout: Any, rank: int, visits: Visits | None) -> Rebalancer:
    """Between two engines."""
    rules = RebalanceRules(3, layout.dp, True, 0.02, StepCost(64.0), 16, 10**6)
    return Restless(
        rules, layout.group_of(rank), layout.tp_rank(rank) == 0, lambda _, n: n + 9, visits
    )


class Talker:
    """Answers with the number of the turn and the prompt's, the later the larger that is.

    The turns of two prompts in three are watched: what is shown of them are their first tokens.

    Attributes:
        watched: Number of the tokens of a turn, and how many were shown before it ended.
    """

    watched: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, tokenizer: object) -> None:
        self._turn = 0
        self._shown: list[int] = []

    def _note(self, first: int, token_ids: tuple[int, ...]) -> None:
        if first <= len(self._shown):  # else they follow what another engine sampled
            self._shown[first:] = token_ids

    def _answer(self, *token_ids: int) -> Observation:
        watch = self._note if self._index % 3 else None
        return Observation(token_ids, reward=float(self._turn), watch=watch)

    def reset(self, prompt: Prompt) -> Observation:
        self._index = prompt.index
        return self._answer(*((100 + prompt.index,) if prompt.index % 2 else ()))

    def step(self, token_ids: tuple[int, ...]) -> Observation:
        assert tuple(self._shown) == token_ids[: len(self._shown)]
        if self._index % 3:
            self.watched.append((len(token_ids), len(self._shown)))
        self._shown = []
        time.sleep(0.03 * self._index)
        self._turn += 1
        return self._answer(100 + self._turn, 110 + self._index)


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

    An agreement is ``packed`` for our reduction, ``engine``, or ``moves`` between engines at
    every third step. With --rollout-drafts conversations are remembered from one to the next, and
    many tokens of the last were drafted.
    """
    history = DraftHistory(2**20) if "--rollout-drafts" in flags else None
    with planned("always", world.rank):
        job, engine = loaded_engine(world, model, ["--vllm-max-num-seqs", "16", *flags], history)
        return _conversations(world, job, engine, agreements, history)


def _conversations(
    world: World, job: Any, engine: Any, agreements: Sequence[str], history: DraftHistory | None
) -> list[dict[int, Any]]:
    from mindspeed_rl.vllm_patches import step_sync

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
        Talker.watched.clear()
        environments = Environments(LocalRunner(Talker, cast(Any, None), 2), "talker", TURNS, 0.0)
        heard = Heard()
        stats = engine.stats = StepStats()
        metrics = run_conversations(
            environments if world.rank % layout.tp == 0 else None,
            prompts,
            engine,
            SETTINGS,
            0,
            lambda sample, turn: request_seed(5, 1, sample, 0, turn),
            cast(Any, heard),
            (lambda visits: restless(layout, world.rank, visits))
            if agreement == "moves"
            else (lambda _: None),
        )
        if agreement == "moves":
            assert sum(gather_objects(stats.moved)) >= 2, stats
        assert "environment/turns" in metrics
        _check_watched(world.rank % layout.tp == 0, agreement == "moves" or history is not None)
        environments.runner.close()
        found.append(heard.samples)
        if history is not None:
            for samples in gather_objects(heard.samples):
                for i, (token_ids, *_) in samples.items():
                    history.add(prompt_key(prompts[i].token_ids), token_ids)
    if history is not None:
        # Of a turn the first token comes with its prompt, and the last may be one of a few.
        assert stats.kept_tokens > 0.25 * stats.sampled_tokens, (stats, found)
    return found


def _check_watched(leads: bool, in_parts: bool) -> None:
    """Check that all tokens but the last of watched turns were shown, in time.

    Args:
        leads: Whether this rank has conversations.
        in_parts: Whether a step may add several tokens, or a turn be sampled elsewhere.
    """
    assert bool(Talker.watched) == leads
    for said, shown in Talker.watched:
        assert shown < said if in_parts else shown == said - 1, Talker.watched
