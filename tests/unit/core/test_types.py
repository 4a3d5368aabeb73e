"""The values of a step."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from mindspeed_rl.core.types import Completion, Prompt, Rollout


def test_a_completion_has_one_logprob_per_token() -> None:
    with pytest.raises(RuntimeError, match="2 tokens but 1 log-probs"):
        Completion((5, 6), (-0.5,), "stop", 0)
    assert Completion((), (), "length", 0).token_ids == ()


@pytest.mark.parametrize(("reason", "truncated"), [("stop", False), ("length", True)])
def test_truncation_follows_the_finish_reason(reason: str, truncated: bool) -> None:
    assert Completion((5,), (-0.5,), reason, 3).truncated is truncated


@pytest.mark.parametrize("reason", ["abort", "error", "repetition", "None"])
def test_a_request_that_was_given_up_is_no_completion(reason: str) -> None:
    with pytest.raises(
        RuntimeError, match=f"ended with '{reason}'; it must be one of stop, length"
    ):
        Completion((5,), (-0.5,), reason, 0)


def test_an_unscored_rollout_has_no_reward() -> None:
    prompt = Prompt(0, (1, 2), "1+1", "2")
    rollout = Rollout(7, prompt, Completion((5,), (-0.5,), "stop", 3))
    assert rollout.reward is None
    assert not rollout.reward_parts
    assert Prompt(0, (1,), "", "").metadata is not prompt.metadata


def test_values_cannot_be_changed() -> None:
    prompt = Prompt(0, (1, 2), "1+1", "2")
    with pytest.raises(FrozenInstanceError):
        prompt.answer = "3"  # type: ignore[misc]
