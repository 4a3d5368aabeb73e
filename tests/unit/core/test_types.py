"""The values of a step."""

from __future__ import annotations

import pytest

from mindspeed_rl.core.types import Completion


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
