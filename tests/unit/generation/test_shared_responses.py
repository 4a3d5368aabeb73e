"""Every rank learns the responses of all engines, in the same order."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_rl.core.types import Completion, Prompt, Rollout
from mindspeed_rl.generation import rollout_worker
from mindspeed_rl.generation.rollout_worker import share_responses
from mindspeed_rl.rollout.draft_history import DraftHistory, prompt_key


def rollout(sample_id: int, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> Rollout:
    completion = Completion(tokens, (0.0,) * len(tokens), "stop", 0)
    return Rollout(sample_id, Prompt(0, prompt, "", ""), completion)


def test_histories_are_equal_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks, of which the second leads no engine."""
    ranks = [[rollout(0, (1, 2), (3,)), rollout(1, (1, 2), (70_000, 5))], [],
             [rollout(2, (1, 2), (6,)), rollout(3, (9,), (8,))]]  # fmt: skip
    sent: list[Any] = []

    def gather(mine: Any) -> list[Any]:
        sent.append(mine)
        return sent

    monkeypatch.setattr(rollout_worker, "gather_objects", gather)
    for mine in ranks:
        history = DraftHistory(10_000)
        share_responses(history, mine)
    assert [list(r) for r in history.earlier(prompt_key((1, 2)))] == [[3], [70_000, 5], [6]]
    assert [list(r) for r in history.earlier(prompt_key((9,)))] == [[8]]
