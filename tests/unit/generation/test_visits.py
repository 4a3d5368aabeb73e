"""Turns of conversations that end on another engine than that of their environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from mindspeed_rl.core.types import Completion, Prompt
from mindspeed_rl.environments import Observation
from mindspeed_rl.generation.multi_turn import Conversations, Environments
from mindspeed_rl.rollout.rebalance_plan import Load, Replica, StepCost, plan_moves


class Echo:
    """Answers every turn at once with its first token plus 100.

    Attributes:
        heard: turns by conversation.
    """

    def __init__(self) -> None:
        self.heard: dict[int, list[tuple[int, ...]]] = {}
        self._answers: dict[int, Observation] = {}

    def reset(self, prompts: Mapping[int, Prompt]) -> None:
        self._answers |= {i: Observation() for i in prompts}

    def step(self, turns: Mapping[int, tuple[int, ...]]) -> None:
        for i, turn in turns.items():
            self.heard.setdefault(i, []).append(turn)
            self._answers[i] = Observation((100 + turn[0],))

    def answers(self, wait_s: float) -> dict[int, Any]:
        answers, self._answers = self._answers, {}
        return answers

    def close(self) -> None:
        """Nothing to end."""


def turn(*token_ids: int) -> Completion:
    return Completion(token_ids, (-1.0,) * len(token_ids), "stop", 0)


def conversations(*numbers: int) -> tuple[Conversations, Echo]:
    echo = Echo()
    prompts = {i: Prompt(i, (7, i), "", "") for i in numbers}
    found = Conversations(Environments(echo, "echo", 9, 0.0), prompts, 50, 0, cast(Any, None))
    found.begin()
    assert {c.sample_id for c in found.take_answered(0.0).samples} == set(numbers)
    return found, echo


def test_turns_go_to_the_environment_of_their_conversation() -> None:
    """Conversation 2 is at home on one engine; its turn ends on the other, beside turn of 5."""
    home, at_home = conversations(2, 3)
    guest, away = conversations(5)
    guest.advance({2: turn(21, 1), 5: turn(51, 1)})
    assert away.heard == {5: [(51, 1)]} and home.num_awaited == 0 and guest.num_awaited == 1
    returned = guest.leaving()
    assert returned == {2: turn(21, 1)} and guest.leaving() == {}
    for side in (home, guest):
        side.come_back(returned)
    assert at_home.heard == {2: [(21, 1)]} and away.heard == {5: [(51, 1)]}
    assert home.num_awaited == 1
    (continued,) = home.take_answered(0.0).samples
    assert continued.sample_id == 2 and continued.token_ids == (21, 1, 121)
    assert continued.max_tokens == 50 - 3


def test_a_turn_is_expected_to_be_as_long_as_earlier_ones() -> None:
    found, _ = conversations(1, 2)
    assert found.expected(1, 10) == 30, "half way to the limit"
    found.advance({1: turn(*range(4)), 2: turn(*range(8))})
    assert [found.expected(1, n) for n in (0, 4, 7, 8)] == [6, 8, 8, 29]


def test_a_turn_that_comes_back_is_read_twice() -> None:
    """Half of the running ones would move, were it not for the way back; waiting ones still do."""
    cost = StepCost(ridge_tokens=4)

    def planned(returns: bool, capacity: int) -> int:
        loads = tuple(Load(i, 20, 100, i < capacity, returns) for i in range(8))
        replicas = [Replica(loads, capacity, 10**9), Replica((), capacity, 10**9)]
        return len(plan_moves(replicas, cost, min_gain=0.05, running=True).moves)

    assert planned(returns=False, capacity=8) == 4 and planned(returns=True, capacity=8) == 0
    assert planned(returns=False, capacity=2) > 0 < planned(returns=True, capacity=2)
