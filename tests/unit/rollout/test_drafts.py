"""When drafts are made, how long they are, and what bad ones cost at most."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_rl.rollout.drafts import Drafter, DraftRule, draft_length

RULE = DraftRule()


def tokens_per_cost(acceptance: float, length: int, rule: DraftRule) -> float:
    """Mean over every sequence of kept and wrong tokens."""
    mean = 0.0
    for outcome in itertools.product((True, False), repeat=length):
        weight = 1.0
        for kept in outcome:
            weight *= acceptance if kept else 1 - acceptance
        mean += weight * (1 + len(list(itertools.takewhile(bool, outcome))))
    return mean / (1 + rule.token_cost * length)


@given(st.floats(0, 1), st.floats(0.01, 0.5))
def test_no_other_length_has_more_tokens_per_cost(acceptance: float, token_cost: float) -> None:
    rule = DraftRule(most=5, token_cost=token_cost)
    best = max(tokens_per_cost(acceptance, length, rule) for length in range(6))
    chosen = draft_length(acceptance, rule)
    assert tokens_per_cost(acceptance, chosen, rule) == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize(("acceptance", "length"), [(0.0, 0), (0.04, 0), (0.06, 1), (1.0, 8)])
def test_a_draft_is_as_long_as_it_pays(acceptance: float, length: int) -> None:
    """At a cost of 1/20 of a step, a token pays that is kept more often than 1 in 20 times."""
    assert draft_length(acceptance, RULE) == length


@given(st.floats(0, 1), st.floats(0, 1))
def test_better_drafts_are_longer(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert draft_length(low, RULE) <= draft_length(high, RULE)


@pytest.mark.parametrize("responses", [1, 20])
def test_drafts_that_are_always_wrong_cost_at_most_their_allowance(responses: int) -> None:
    drafter = Drafter(RULE)
    draw = random.Random(3)
    earlier = [[draw.randrange(4) for _ in range(300)] for _ in range(3)]
    for i in range(responses):
        drafter.open(str(i), (1, 2, 3), (), earlier)
    drafts: dict[int, list[int]] = {}
    for _, i in itertools.product(range(200), range(responses)):
        wrong = 1 + (drafts[i][0] if drafts.get(i) else draw.randrange(4))
        drafts[i] = drafter.step(str(i), [wrong % 4], room=100)
    ledger = drafter.ledger
    assert ledger.steps == 200 * responses and ledger.kept == 0
    assert 0 < ledger.drafted * RULE.token_cost <= RULE.allowed_loss * ledger.steps


def generate(drafter: Drafter, name: str, text: list[int]) -> int:
    """Steps in which a response of this text is done; drafts are kept as far as they are right."""
    done, steps, draft = 0, 0, list[int]()
    while done < len(text):
        right = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(draft, text[done:]))  # noqa: B905
        count = min(1 + len(list(right)), len(text) - done)
        draft = drafter.step(name, text[done : done + count], room=len(text))
        done, steps = done + count, steps + 1
    return steps


def test_a_response_that_was_there_before_takes_few_steps() -> None:
    """The limit is one step for 9 tokens; without drafts it is one for each."""
    text = random.Random(1).choices(range(1000), k=400)
    drafter = Drafter(RULE)
    drafter.open("again", (7, 8, 9), (), [text])
    steps = generate(drafter, "again", text)
    assert 400 / 9 < steps < 0.3 * 400


def test_a_sibling_that_is_further_is_followed() -> None:
    text = random.Random(2).choices(range(1000), k=300)
    drafter = Drafter(RULE)
    drafter.open("first", (7, 8, 9), (), [])
    assert generate(drafter, "first", text) == 300
    drafter.open("second", (7, 8, 9), (), [])
    assert generate(drafter, "second", text) < 0.3 * 300
    drafter.open("stranger", (7, 8, 1), (), [])
    assert generate(drafter, "stranger", text) == 300


def test_a_draft_stays_within_the_room_of_its_response() -> None:
    drafter = Drafter(DraftRule(allowed_loss=10.0))
    drafter.open("a", (1, 2), (), [[3, 4, 5, 6, 7]])
    assert drafter.step("a", [3], room=2) == [4, 5]
    assert drafter.step("a", [4, 5, 6], room=0) == []
    assert drafter.step("unknown", [4], room=5) == []


def test_a_prefix_is_part_of_the_text() -> None:
    drafter = Drafter(DraftRule(allowed_loss=10.0))
    drafter.open("a", (1, 2), (3, 4), [[3, 4, 5, 6, 7]])
    assert drafter.step("a", [5], room=5)[:2] == [6, 7]
