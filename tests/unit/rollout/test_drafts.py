"""What is drafted for a response, and how long drafts are."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_rl.rollout.draft_costs import DraftController, DraftPlan, DraftRule
from mindspeed_rl.rollout.drafts import Drafter, SampledRow, draft_length

RULE = DraftRule()
PLAN = DraftPlan(10**6, RULE.token_cost, 0.0)


def drafter_with(plan: DraftPlan = PLAN, rule: DraftRule = RULE) -> Drafter:
    controller = DraftController(rule)
    controller.follow(plan)
    ticks = itertools.count()
    return Drafter(controller, lambda: float(next(ticks)))


def step(drafter: Drafter, name: str, tokens: Sequence[int], room: int) -> list[int]:
    (draft,) = drafter.step([SampledRow(name, tokens, room)])
    return draft


def tokens_per_cost(acceptance: float, length: int, plan: DraftPlan) -> float:
    """Mean over every sequence of kept and wrong tokens."""
    mean = 0.0
    for outcome in itertools.product((True, False), repeat=length):
        weight = 1.0
        for kept in outcome:
            weight *= acceptance if kept else 1 - acceptance
        mean += weight * (1 + len(list(itertools.takewhile(bool, outcome))))
    return mean / (1 + plan.search_cost * bool(length) + plan.token_cost * length)


@given(st.floats(0, 1), st.floats(0.01, 0.5), st.floats(0, 1))
def test_no_other_length_has_more_tokens_per_cost(
    acceptance: float, token_cost: float, search_cost: float
) -> None:
    plan = DraftPlan(1, token_cost, search_cost)
    best = max(tokens_per_cost(acceptance, length, plan) for length in range(6))
    chosen = draft_length(acceptance, plan, 5)
    assert tokens_per_cost(acceptance, chosen, plan) == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize(("acceptance", "length"), [(0.0, 0), (0.04, 0), (0.06, 1), (1.0, 8)])
def test_a_draft_is_as_long_as_it_pays(acceptance: float, length: int) -> None:
    """At a cost of 1/20 of a step, a token pays that is kept more often than 1 in 20 times."""
    assert draft_length(acceptance, PLAN, 8) == length


def test_a_search_that_costs_more_than_its_draft_saves_is_not_made() -> None:
    assert draft_length(0.5, DraftPlan(1, 0.0, 0.9), 8) == 8
    assert draft_length(0.5, DraftPlan(1, 0.0, 1.1), 8) == 0


@given(st.floats(0, 1), st.floats(0, 1))
def test_better_drafts_are_longer(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert draft_length(low, PLAN, 8) <= draft_length(high, PLAN, 8)


def generate(drafter: Drafter, name: str, text: list[int]) -> int:
    """Steps in which a response of this text is done; drafts are kept as far as they are right."""
    done, steps, draft = 0, 0, list[int]()
    while done < len(text):
        right = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(draft, text[done:]))  # noqa: B905
        count = min(1 + len(list(right)), len(text) - done)
        draft = step(drafter, name, text[done : done + count], room=len(text))
        done, steps = done + count, steps + 1
    return steps


def test_a_response_whose_drafts_are_wrong_has_few() -> None:
    """One token in 32 steps, after the first few."""
    drafter, draw = drafter_with(), random.Random(3)
    earlier = [[draw.randrange(4) for _ in range(300)] for _ in range(3)]
    drafter.open("a", (1, 2, 3), (), earlier)
    draft: list[int] = []
    lengths = []
    for _ in range(400):
        wrong = 1 + (draft[0] if draft else draw.randrange(4))
        draft = step(drafter, "a", [wrong % 4], room=100)
        lengths.append(len(draft))
    assert sum(lengths[:30]) > 5
    assert 8 <= sum(lengths[100:]) <= 12 and max(lengths[100:]) == 1
    assert drafter.ledger.kept == 0 and drafter.ledger.drafted == sum(lengths)


def test_a_response_that_was_there_before_takes_few_steps() -> None:
    """The limit is one step for 9 tokens; without drafts it is one for each."""
    text = random.Random(1).choices(range(1000), k=400)
    drafter = drafter_with()
    drafter.open("again", (7, 8, 9), (), [text])
    steps = generate(drafter, "again", text)
    assert 400 / 9 < steps < 0.3 * 400
    assert drafter.saved_steps(capacity=1) == 400 - steps


def test_a_sibling_that_is_further_is_followed() -> None:
    text = random.Random(2).choices(range(1000), k=300)
    drafter = drafter_with()
    drafter.open("first", (7, 8, 9), (), [])
    assert generate(drafter, "first", text) == 300
    drafter.open("second", (7, 8, 9), (), [])
    assert generate(drafter, "second", text) < 0.3 * 300
    drafter.open("stranger", (7, 8, 1), (), [])
    assert generate(drafter, "stranger", text) == 300


def test_many_earlier_responses_are_read_little_by_little() -> None:
    """No search waits for all of them, and in the end the last is known as well."""
    draw = random.Random(4)
    earlier = [draw.choices(range(1000), k=700) for _ in range(5)]
    drafter = drafter_with()
    drafter.open("a", (7, 8, 9), (), earlier)
    missing = drafter._texts[7, 8, 9]._missing
    read = []
    for tokens in draw.choices(range(1000, 2000), k=32 * 20):
        step(drafter, "a", [tokens], room=8)
        read.append(sum(map(len, earlier[-len(missing) :])) if missing else 0)
    assert all(before - after <= 700 for before, after in itertools.pairwise(read))
    assert read[0] == 3500 and read[-1] == 0
    drafter.open("b", (7, 8, 9), earlier[-1][:50], earlier)
    assert step(drafter, "b", earlier[-1][50:52], room=2) == earlier[-1][52:54]


def test_a_draft_stays_within_the_room_of_its_response() -> None:
    drafter = drafter_with()
    drafter.open("a", (1, 2), (), [[3, 4, 5, 6, 7]])
    assert step(drafter, "a", [3], room=2) == [4, 5]
    assert step(drafter, "a", [4, 5, 6], room=0) == []
    assert step(drafter, "unknown", [4], room=5) == []


def test_a_prefix_is_part_of_the_text() -> None:
    drafter = drafter_with()
    drafter.open("a", (1, 2), (3, 4), [[3, 4, 5, 6, 7]])
    assert step(drafter, "a", [5], room=5)[:2] == [6, 7]


def test_a_later_turn_is_the_same_conversation() -> None:
    """Its text goes on with what the environment said, and its drafts are as long as before."""
    before = [[3, 4, 5, 50, 51, 6, 7, 8, 9, 10]]
    drafter = drafter_with()
    drafter.open("a", (1, 2), (), before)
    assert step(drafter, "a", [3], room=9)[:2] == [4, 5]
    step(drafter, "a", [4, 5, 50], room=0)
    acceptance = drafter._responses["a"].acceptance
    drafter.open("a", (1, 2), (3, 4, 5, 50, 51), before)
    assert step(drafter, "a", [6], room=3) == [7, 8, 9]
    assert len(drafter._responses) == 1 and drafter._responses["a"].acceptance == acceptance > 0.5
    assert drafter._responses["a"].sampled == 5, "of both turns"


def test_texts_of_steps_without_drafts_are_known_later() -> None:
    """A plan that seeks nothing reads nothing, and forgets nothing."""
    drafter = drafter_with(DraftPlan(0, 0.05, 0.0))
    drafter.open("a", (1, 2), (), [])
    drafter.open("b", (1, 2), (), [])
    for token in (3, 4, 5, 6, 7, 8):
        assert step(drafter, "a", [token], room=5) == []
    assert drafter.ledger.search_seconds == 0.0
    assert not drafter._texts[1, 2].index._places
    drafter._controller.follow(PLAN)
    assert step(drafter, "a", [9], room=5) == []
    assert step(drafter, "b", [3, 4], room=2) == [5, 6]


def test_a_step_is_timed_with_what_it_did() -> None:
    drafter = drafter_with(DraftPlan(2, 0.05, 0.0))
    drafter.open("a", (1, 2), (), [[3, 4, 5, 6, 7, 8, 9, 10]])
    drafter.open("b", (1, 2), (), [])
    assert drafter.end_step(1.0) is None, "nothing was sampled"

    def times(*rows: tuple[str, list[int]]) -> tuple[object, ...]:
        drafter.step([SampledRow(name, tokens, 3) for name, tokens in rows])
        time = drafter.end_step(9.0)
        assert time is not None and time.seconds == 9.0
        return (time.responses, time.drafted, time.kept, time.searches, time.search_seconds,
                time.reads_prompt)  # fmt: skip

    assert times(("a", [3]), ("b", [])) == (2, 0, 0, 1, 1.0, True)
    assert times(("a", [4, 5]), ("b", [3])) == (2, 3, 1, 2, 1.0, True)
    assert times(("a", [6]), ("b", [4])) == (2, 5, 0, 0, 0.0, False)
    assert times(("a", [7]), ("b", [5])) == (2, 0, 0, 0, 0.0, False), "of each draft once"
