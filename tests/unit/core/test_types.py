"""The values of a step."""

from __future__ import annotations

import pytest

from mindspeed_rl.core.types import Completion


def test_a_completion_has_one_logprob_per_token() -> None:
    with pytest.raises(RuntimeError, match="2 tokens"):
        Completion((5, 6), (-0.5,), "stop", 0)
    assert Completion((), (), "length", 0).token_ids == ()


def test_a_request_that_was_given_up_is_no_completion() -> None:
    with pytest.raises(RuntimeError, match="abort"):
        Completion((5,), (-0.5,), "abort", 0)
