"""Engines sample the same tokens with drafts as without, in fewer steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from make_tiny_model import write_tiny_model
from support.draft_models import speculation
from support.draft_world import DraftRun, draft_world
from support.spawn import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
RECORDED = ("--rl-routing-replay", "rollout")


def check_samples(plain: list[DraftRun], drafted: list[DraftRun]) -> None:
    """Compare what ranks sampled, each its share, with what one rank sampled without drafts."""
    (wanted,) = plain
    for found in drafted:
        for number, (mine, other) in enumerate(zip(found.passes, wanted.passes, strict=True)):
            assert mine and mine.keys() <= other.keys()
            for i, completion in mine.items():
                assert completion.token_ids == other[i].token_ids, (number, i)
                assert completion.logprobs == pytest.approx(other[i].logprobs, abs=2e-5)
                assert completion.finish_reason == other[i].finish_reason
                assert completion.experts == other[i].experts
    for number, done in enumerate(wanted.passes):
        assert {i for found in drafted for i in found.passes[number]} == set(done)


def check(plain: list[DraftRun], drafted: list[DraftRun]) -> None:
    """Compare samples, and what is counted of drafts from texts."""
    check_samples(plain, drafted)
    (wanted,) = plain
    for found in drafted:
        tokens = [sum(len(c.token_ids) for c in done.values()) for done in found.passes]
        assert [stats.sampled_tokens for stats in found.stats] == tokens
        assert sum(stats.kept_tokens for stats in found.stats) > 0
    assert all(stats.response_steps == 0 for stats in wanted.stats)
    for earlier, later in ((0, 1), (1, 3)):
        assert wanted.passes[earlier] != wanted.passes[later], "passes differ"


def check_steps(plain: list[DraftRun], drafted: list[DraftRun]) -> None:
    """The third pass has the seeds of the first, whose responses are known."""
    for found in drafted:
        again = found.stats[2]
        assert again.kept_tokens > 0.5 * again.sampled_tokens
        assert again.response_steps < 0.5 * again.sampled_tokens
        assert again.steps - again.dummy_steps < 0.6 * plain[0].stats[2].steps
        assert again.saved_steps > 0.4 * plain[0].stats[2].steps


def test_tokens_are_those_without_drafts(tiny_model: Path, tmp_path: Path) -> None:
    """One rank without drafts; two that share the model with them."""
    model = str(tiny_model)
    plain = run_ranks(draft_world, 1, work_dir=tmp_path, args=(model, [], ""))
    flags = ["--rollout-tp", "2"]
    drafted = run_ranks(draft_world, 2, work_dir=tmp_path, args=(model, flags, "always"))
    check(plain, drafted)
    check_steps(plain, drafted)
    assert all(run.stats[4].sampled_tokens == run.stats[1].sampled_tokens for run in drafted)
    assert plain[0].passes[1].keys() == plain[0].passes[4].keys()


def test_tokens_do_not_depend_on_times(tiny_model: Path, tmp_path: Path) -> None:
    """Each rank would draft in other steps, and follows the first; what is sampled is the same."""
    model = str(tiny_model)
    plain = run_ranks(draft_world, 1, work_dir=tmp_path, args=(model, [], ""))
    flags = ["--rollout-tp", "2"]
    drafted = run_ranks(draft_world, 2, work_dir=tmp_path, args=(model, flags, "at random"))
    check(plain, drafted)
    first, second = drafted
    for one, other in zip(first.stats, second.stats, strict=True):
        assert one.drafted_tokens == other.drafted_tokens


def test_tokens_and_experts_are_those_without_drafts(tmp_path: Path) -> None:
    """A Qwen3-MoE: two ranks that share its experts, once each with requests of its own."""
    model = str(write_tiny_model(tmp_path / "model", family="qwen3_moe"))

    def runs(ranks: int, plans: str, *flags: str) -> list[DraftRun]:
        args = (model, [*RECORDED, *flags], plans, False)
        return run_ranks(draft_world, ranks, work_dir=tmp_path, args=args)

    plain = runs(1, "")
    assert all(c.experts for done in plain[0].passes for c in done.values())
    drafted = runs(2, "always", "--rollout-tp", "2", "--rollout-ep", "2")
    check(plain, drafted)
    check_steps(plain, drafted)
    drafter = write_tiny_model(tmp_path / "drafter", seed=5, num_layers=1)
    check_samples(
        plain,
        runs(
            *(2, "", "--rollout-tp", "2", "--rollout-ep", "2"),
            *speculation("draft_model", drafter),
        ),
    )
    shared = runs(2, "always", "--rollout-dp", "2", "--rollout-ep", "2")
    check(plain, shared)
    check_steps(plain, shared)
    for found in shared:
        assert all(s.prompt_steps <= 2 for s in found.stats), "drafts are no prompts"
