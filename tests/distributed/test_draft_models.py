"""Engines sample the same tokens with a model that drafts as without, whose weights stay."""

from __future__ import annotations

from pathlib import Path

import pytest
from make_tiny_model import write_tiny_model
from support.draft_model_world import DraftModelRun, draft_model_world
from support.draft_models import LENGTH, speculation, write_eagle_head
from support.spawn import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of the policy, the second of which drafts as well."""
    work = tmp_path_factory.mktemp("drafts")
    write_tiny_model(work / "first")
    write_tiny_model(work / "second", seed=7)
    return work


def runs(folder: Path, ranks: int, *flags: str) -> list[DraftModelRun]:
    args = (str(folder / "first"), str(folder / "second"), list(flags))
    found: list[DraftModelRun] = run_ranks(draft_model_world, ranks, work_dir=folder, args=args)
    return found


@pytest.fixture(scope="module")
def plain(folder: Path) -> DraftModelRun:
    (found,) = runs(folder, 1)
    assert found.passes[0] != found.passes[4], "the update changed the policy"
    assert [c.token_ids for c in found.passes[0].values()] == [
        c.token_ids for c in found.passes[2].values()
    ]
    return found


def check(found: DraftModelRun, plain: DraftModelRun) -> None:
    for number, (mine, other) in enumerate(zip(found.passes, plain.passes, strict=True)):
        assert mine.keys() == other.keys()
        for i, completion in mine.items():
            assert completion.token_ids == other[i].token_ids, (number, i)
            assert completion.logprobs == pytest.approx(other[i].logprobs, abs=2e-5)
            assert completion.finish_reason == other[i].finish_reason
    assert found.stays and not found.from_files
    assert found.updated == plain.updated
    weights, cached = found.found
    assert found.predicted[1] == cached
    assert weights - 8_000 < found.predicted[0] <= weights, "vLLM pads the vocabulary"


def test_a_draft_model_changes_no_token_and_keeps_its_weights(
    folder: Path, plain: DraftModelRun
) -> None:
    """It is the policy itself after the update, and then nearly every draft is right."""
    (found,) = runs(folder, 1, *speculation("draft_model", folder / "second"))
    check(found, plain)
    assert not found.follows
    *_, wrong, _, right = found.steps
    longest = max(len(c.token_ids) for c in plain.passes[-1].values())
    assert right <= longest / (1 + LENGTH) + 3
    assert wrong > 0.8 * plain.steps[3], "another model drafts other tokens"


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_head_changes_no_token_and_shares_the_embeddings(
    folder: Path, plain: DraftModelRun, method: str
) -> None:
    head = write_eagle_head(folder / method, method)
    (found,) = runs(folder, 1, *speculation(method, head))
    check(found, plain)
    shared = ["model.embed_tokens.weight"]
    assert found.follows == (["lm_head.weight", *shared] if method == "eagle" else shared)


def test_two_ranks_share_a_draft_model(folder: Path, plain: DraftModelRun) -> None:
    found = runs(folder, 2, *speculation("draft_model", folder / "second"), "--rollout-tp", "2")
    for one in found:
        check(one, plain)
    assert found[0].steps == found[1].steps
    assert found[0].steps[-1] < 0.4 * plain.steps[-1]
