"""Responses that pause between passes keep their cache, and are those that are read again."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.paused_world import COUNT, paused_world
from support.spawn import run_ranks

pytestmark = pytest.mark.distributed


def test_a_paused_response_is_not_read_again(tiny_model: Path, tmp_path: Path) -> None:
    """Prompts are read once, and more where paused responses had to give up their blocks."""
    (runs,) = run_ranks(paused_world, 1, work_dir=tmp_path, args=(str(tiny_model), []))
    wanted = runs["read again"].completions
    assert len(wanted) == COUNT
    for name, run in runs.items():
        for i, completion in run.completions.items():
            assert completion.token_ids == wanted[i].token_ids, (name, i)
            assert completion.logprobs == pytest.approx(wanted[i].logprobs, abs=2e-5)
            assert completion.finish_reason == wanted[i].finish_reason
        sampled = sum(len(c.token_ids) for c in run.completions.values())
        assert run.stats.sampled_tokens == sampled
        assert run.left == (0, 0.0), "what nobody continues is freed with the cache"
    prompts = sum(20 + 9 * (i % 4) - 1 for i in range(COUNT))  # the last one predicts
    again, kept, few = (runs[name] for name in ("read again", "kept", "few blocks"))
    assert kept.read == prompts and kept.stats.resumed > COUNT
    assert again.read == prompts + kept.stats.kept_cached_tokens
    assert prompts < few.read < again.read and 0 < few.stats.resumed < kept.stats.resumed
