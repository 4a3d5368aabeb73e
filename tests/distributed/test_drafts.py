"""Engines sample the same tokens with drafts as without, in fewer steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from make_tiny_model import write_tiny_model
from support.draft_world import DraftRun, draft_world
from support.spawn import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def check(plain: list[DraftRun], drafted: list[DraftRun]) -> None:
    (wanted,) = plain
    for found in drafted:
        for number, (mine, other) in enumerate(zip(found.passes, wanted.passes, strict=True)):
            assert mine.keys() == other.keys()
            for i, completion in mine.items():
                assert completion.token_ids == other[i].token_ids, (number, i)
                assert completion.logprobs == pytest.approx(other[i].logprobs, abs=2e-5)
                assert completion.finish_reason == other[i].finish_reason
        again = found.stats[2]
        assert again.kept_tokens > 0.5 * again.sampled_tokens
        assert again.response_steps < 0.5 * again.sampled_tokens
        assert again.steps < 0.6 * wanted.stats[2].steps
        tokens = [sum(len(c.token_ids) for c in done.values()) for done in found.passes]
        assert [stats.sampled_tokens for stats in found.stats] == tokens
    assert all(run.stats[4].sampled_tokens == run.stats[1].sampled_tokens for run in drafted)
    assert all(stats.response_steps == 0 for stats in wanted.stats)
    for earlier, later in ((0, 1), (1, 3)):
        assert wanted.passes[earlier] != wanted.passes[later], "passes differ"
    assert wanted.passes[1].keys() == wanted.passes[4].keys()
    assert all(c.token_ids == wanted.passes[4][i].token_ids for i, c in wanted.passes[1].items())


def test_tokens_are_those_without_drafts(tiny_model: Path, tmp_path: Path) -> None:
    """One rank without drafts; two that share the model with them."""
    model = str(tiny_model)
    plain = run_ranks(draft_world, 1, work_dir=tmp_path, args=(model, [], False))
    flags = ["--rollout-tp", "2"]
    check(plain, run_ranks(draft_world, 2, work_dir=tmp_path, args=(model, flags, True)))


def test_tokens_are_those_without_drafts_with_experts(tmp_path: Path) -> None:
    """Two ranks that share the experts of a Qwen3-MoE."""
    model = str(write_tiny_model(tmp_path / "model", family="qwen3_moe"))
    plain = run_ranks(draft_world, 1, work_dir=tmp_path, args=(model, [], False))
    flags = ["--rollout-tp", "2", "--rollout-ep", "2"]
    check(plain, run_ranks(draft_world, 2, work_dir=tmp_path, args=(model, flags, True)))
