"""Conversations on every kind of engine are those of one rank, whenever environments answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from make_tiny_model import write_tiny_model
from support.conversation_world import NUM_PROMPTS, SETTINGS, TURNS, conversation_world
from support.spawn import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_ranks_of_an_engine_hold_the_same_conversations(tmp_path: Path) -> None:
    """Tensor-parallel ranks hear of turns from the first; data-parallel ones wait for each other.

    The last prompt of one data-parallel rank is answered when the other rank has ended, which goes
    on stepping with it.
    """
    model = str(write_tiny_model(tmp_path / "model", family="qwen3_moe"))

    def samples(name: str, ranks: int, flags: list[str], *agreements: str) -> list[Any]:
        args = (model, flags, agreements)
        by_rank = run_ranks(conversation_world, ranks, work_dir=tmp_path / name, args=args)
        return [
            {i: s for rank in by_rank for i, s in rank[run].items()}
            for run in range(len(agreements))
        ]

    (alone,) = samples("one", 1, [], "engine")
    assert sorted(alone) == list(range(NUM_PROMPTS))
    for token_ids, mask, reward in alone.values():
        assert len(token_ids) == len(mask) <= SETTINGS.max_response_tokens
        assert reward == TURNS or len(token_ids) >= SETTINGS.max_response_tokens - 2
    assert sum(reward == TURNS for _, _, reward in alone.values()) > NUM_PROMPTS // 2
    (tensor,) = samples("tensor", 2, ["--rollout-tp", "2"], "engine")
    assert tensor == alone
    # turns move between two engines, begun or not, and their environments stay
    assert samples("moved", 2, [], "moves") == [alone]
    # so do turns between two engines of two ranks, of which one knows the environments
    assert samples("moved tensor", 4, ["--rollout-tp", "2"], "moves") == [alone]
    data = ["--rollout-dp", "2", "--rollout-ep", "2", "--rollout-dp-sync", "engine"]
    assert samples("data", 2, data, "engine", "packed") == [alone, alone]
    # later turns are drafted from what followed the first prompt, environments' words included
    drafts = ["--rollout-tp", "2", "--rollout-drafts", "history"]
    assert samples("drafts", 2, drafts, "engine", "engine") == [alone, alone]
