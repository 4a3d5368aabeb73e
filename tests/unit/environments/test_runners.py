"""Environments elsewhere: a conversation stays with its actor, and a lost one costs only its own.

Without Ray; the same with real actors is in test_rewards_ray.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_rl.core.types import Prompt
from mindspeed_rl.environments import Failed, LocalRunner, Observation, RayRunner


class Counting:
    """Answers with its prompt and the number of its turns."""

    def __init__(self, tokenizer: object) -> None:
        self.turns = 0

    def reset(self, prompt: Prompt) -> Observation:
        self.prompt = prompt.index
        return Observation((self.prompt,))

    def step(self, token_ids: tuple[int, ...]) -> Observation:
        self.turns += 1
        if token_ids == (13,):
            raise OSError("the tool is gone")
        return Observation((self.prompt, self.turns))


class Gone(Exception):
    """An actor that was lost."""


class Actor:
    """A local runner behind the face of an actor; ``lost``: it answers no more."""

    def __init__(self) -> None:
        runner: Any = LocalRunner(Counting, None)  # type: ignore[arg-type]
        self.asked: list[set[int]] = []
        self.lost = False

        def remote(method: str) -> Any:
            def call(share: Mapping[int, Any]) -> Any:
                self.asked.append(set(share))
                return Gone("killed") if self.lost else getattr(runner, method)(share)

            return SimpleNamespace(remote=call)

        self.reset, self.step = remote("reset"), remote("step")


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> RayRunner:
    """Two actors."""

    def get(answer: Any) -> Any:
        if isinstance(answer, Gone):
            raise answer
        return answer

    found = object.__new__(RayRunner)
    found._ray = SimpleNamespace(get=get, exceptions=SimpleNamespace(RayActorError=Gone))
    found._actors = [Actor(), Actor()]
    monkeypatch.setattr(RayRunner, "_start", lambda self: Actor())
    return found


PROMPTS = {i: Prompt(20 + i, (1,), "", "") for i in range(5)}


def test_a_conversation_stays_with_its_actor(runner: RayRunner) -> None:
    actors = list(runner._actors)
    assert runner.reset(PROMPTS) == {i: Observation((20 + i,)) for i in PROMPTS}
    assert runner.step({3: (7,), 0: (8,)}) == {3: Observation((23, 1)), 0: Observation((20, 1))}
    assert list(runner.step({3: (7,), 0: (8,)})) == [3, 0], "in the order that was asked"
    assert runner.step({3: (7,)}) == {3: Observation((23, 3))}
    assert actors[0].asked == [{0, 2, 4}, {0}, {0}]
    assert actors[1].asked == [{1, 3}, {3}, {3}, {3}]


def test_what_an_environment_raises_costs_its_sample(runner: RayRunner) -> None:
    runner.reset(PROMPTS)
    answers = runner.step({0: (13,), 2: (5,)})
    assert isinstance(answers[0], Failed) and "OSError: the tool is gone" in answers[0].trace
    assert answers[2] == Observation((22, 1))


def test_a_lost_actor_costs_its_conversations_and_is_replaced(runner: RayRunner) -> None:
    runner.reset(PROMPTS)
    runner._actors[0].lost = True
    answers = runner.step({4: (5,), 1: (5,), 2: (5,)})
    assert list(answers) == [4, 1, 2]
    assert isinstance(answers[4], Failed) and isinstance(answers[2], Failed)
    assert answers[1] == Observation((21, 1)), "of the other actor"
    assert "its Ray actor is lost: killed" in answers[4].trace
    assert runner.reset(PROMPTS)[4] == Observation((24,)), "by the actor in its place"
