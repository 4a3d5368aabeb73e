"""Rewards are tried on prompts of the data before anything large is loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.rewards_support import make_pool

from mindspeed_rl.core.types import Prompt
from mindspeed_rl.generation.scoring import RewardFunctions
from mindspeed_rl.rewards import RewardError, RewardPool
from mindspeed_rl.rewards.drawn import DrawnRewards

# A token per character; scored as a response of as many tokens and one that ends it.
TOKENIZER = cast(Any, SimpleNamespace(encode=lambda text, add_special_tokens: list(text)))
ROWS = [("17", {}), ("bad", {}), ("", {"rewards": ["format"]})]
PROMPTS = [
    Prompt(index, (5,), f"question {index}", answer, metadata)
    for index, (answer, metadata) in enumerate(ROWS)
]


def functions(pool: RewardPool | DrawnRewards | None, *names: str, **more: Any) -> RewardFunctions:
    return RewardFunctions(names, pool, TOKENIZER, **more)


def test_answers_are_scored_as_responses_that_have_ended() -> None:
    with make_pool("exact_match", "format") as pool:
        told = functions(pool, "exact_match", "format").trial(PROMPTS)
    assert told == ("rewards of the answers of 3 prompts: exact_match 1, 1, none; format 1, 1, 1",)


def test_what_an_environment_says_is_not_known_yet() -> None:
    with make_pool("environment", max_error_rate=0.0) as pool:
        rewards = functions(pool, "environment", in_conversation=True)
        assert rewards.trial(PROMPTS[:2]) == (
            "rewards of the answers of 2 prompts: environment none, none",
        )


def test_rewards_that_fail_above_their_limit_end_the_start() -> None:
    with make_pool(":raises_on_bad", max_error_rate=0.05) as pool:
        rewards = functions(pool, "raises_on_bad")
        rewards.trial(PROMPTS[:2])  # one alone may be odd
        rewards.trial(PROMPTS[:2])  # and is not counted with those of the run
    with make_pool(":raises_on_bad", max_error_rate=0.05) as pool:
        rewards = functions(pool, "raises_on_bad")
        said = "with their own answers as responses, 3 of 3 .*(?s:.*)RuntimeError: cannot score bad"
        with pytest.raises(RewardError, match=said):
            rewards.trial([PROMPTS[1]] * 3)


def test_ranks_without_workers_and_drawn_rewards_try_nothing() -> None:
    assert functions(None, "format").trial(PROMPTS) == ()
    assert functions(DrawnRewards(7), "drawn").trial(PROMPTS) == ()
