"""The history of response lengths, and how samples are dealt to engines by it."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl.samples.lengths import LengthHistory, assign_to_engines

LIMIT = 100


def history_of(*steps: dict[int, list[int]]) -> LengthHistory:
    history = LengthHistory()
    for step in steps:
        history.observe(step)
    return history


def test_a_prompt_is_expected_to_be_as_long_as_it_was_beside_others() -> None:
    """Prompt 1 had half of the mean and prompt 2 one and a half; then all lengths double.

    What is said of a new prompt counts as one response more, of mean length.
    """
    history = history_of({1: [10, 10, 10], 2: [30, 30, 30]})
    assert [history.expected(p, 0, LIMIT) for p in (1, 2, 9)] == [12, 28, 20]
    history.observe({1: [20], 2: [60]})
    relative = [(5 / 8 + 1 / 2) / 2, (11 / 8 + 3 / 2) / 2]
    ratio = (20 / 40 / (5 / 8) + 60 / 40 / (11 / 8)) / 2  # found over foretold, of known prompts
    found = [history.expected(p, 0, LIMIT) for p in (1, 2)]
    assert found == [round(40 * r * ratio) for r in relative]


def test_what_goes_on_is_expected_to_be_longer_than_it_is() -> None:
    """The mean of the lengths beyond; half way to the limit where none was longer."""
    history = history_of({0: [10], 1: [24], 2: [62]})
    unknown = 7
    found = [history.expected(unknown, n, LIMIT) for n in (0, 10, 30, 62, 99)]
    assert found == [32, 43, 62, 81, 100]
    assert LengthHistory().expected(unknown, 0, LIMIT) == 50


def test_known_prompts_have_a_spread_of_their_own() -> None:
    """Two prompts that differ tenfold, each always alike: one that goes on is near its end."""
    step = {1: [10] * 9, 2: [90] * 9}
    history = history_of(step, step, step, step, step, step)
    assert history.expected(1, 9, LIMIT) < 20 and history.expected(9, 9, LIMIT) > 40


def test_a_history_survives_a_checkpoint() -> None:
    history, copy = history_of({1: [11, 12], 2: [30]}, {5: [3]}), LengthHistory()
    copy.load_state_dict(json.loads(json.dumps(history.state_dict())))
    for prompt in range(6):
        for generated in (0, 2, 20):
            wanted = history.expected(prompt, generated, LIMIT)
            assert copy.expected(prompt, generated, LIMIT) == wanted
    assert bool(copy) and not LengthHistory()
    empty = LengthHistory()
    empty.load_state_dict(LengthHistory().state_dict())
    assert not empty


def test_the_longest_response_to_a_prompt_is_known_from_all_steps() -> None:
    history = history_of({1: [11, 40], 2: [30]}, {1: [12, 9], 3: []})
    assert [history.longest(p) for p in (1, 2, 3)] == [40, 30, None]
    copy = LengthHistory()
    copy.load_state_dict(json.loads(json.dumps(history.state_dict())))
    assert [copy.longest(p) for p in (1, 2, 3)] == [40, 30, None]
    older = {k: v for k, v in history.state_dict().items() if k != "longest"}
    copy.load_state_dict(older)
    assert copy.longest(1) is None and copy.expected(1, 0, LIMIT) == history.expected(1, 0, LIMIT)


def test_every_prompt_has_an_expected_length_once_any_is_known() -> None:
    assert LengthHistory().expected_lengths(3, LIMIT) == []
    history = history_of({0: [10, 10, 10], 2: [30, 30, 30]})
    assert history.expected_lengths(3, LIMIT) == [12, 20, 28]


def test_a_step_without_samples_changes_nothing() -> None:
    history = history_of({1: [10], 2: [30]})
    before = history.state_dict()
    history.observe({})
    history.observe({3: []})
    assert history.state_dict() == before


@given(st.integers(1, 12), st.integers(0, 50))
@settings(deadline=None)
def test_shares_without_a_history_are_contiguous_and_even(groups: int, samples: int) -> None:
    shares = assign_to_engines([i // 4 for i in range(samples)], groups, LengthHistory(), LIMIT)
    assert [i for share in shares for i in share] == list(range(samples))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert shares == assign_to_engines([0] * samples, groups, None, LIMIT)


@given(st.integers(1, 8), st.integers(1, 20), st.integers(1, 6), st.integers(0, 99))
@settings(deadline=None, max_examples=60)
def test_every_sample_is_dealt_once(groups: int, prompts: int, size: int, seed: int) -> None:
    draw = random.Random(seed)
    history = history_of({p: [draw.randint(1, LIMIT)] for p in range(0, prompts, 2)})
    asked = [p for p in range(prompts) for _ in range(size)]
    shares = assign_to_engines(asked, groups, history, LIMIT)
    assert sorted(i for share in shares for i in share) == list(range(len(asked)))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert all(share == sorted(share) for share in shares)


@pytest.mark.parametrize("groups", [2, 4])
def test_siblings_of_a_hard_prompt_are_spread(groups: int) -> None:
    """One prompt of eight is ten times as long; its 4 siblings would be on one engine."""
    history = history_of({p: [10 if p else 100] for p in range(8)})
    asked = [p for p in range(8) for _ in range(4)]
    shares = assign_to_engines(asked, groups, history, LIMIT)
    hard = [sum(asked[i] == 0 for i in share) for share in shares]
    assert hard == [4 // groups] * groups
    loads = [sum(100 if asked[i] == 0 else 10 for i in share) for share in shares]
    assert max(loads) == min(loads)
    even = assign_to_engines(asked, groups, None, LIMIT)
    assert max(sum(100 if asked[i] == 0 else 10 for i in s) for s in even) > 1.4 * max(loads)
