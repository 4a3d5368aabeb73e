"""A reward model's scores and a refreshed reference in the steps of a run.

Policy, reference and scorer are tables: see ``test_rl_step``.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from support.rl_run import TableRun, TableScorer, make_run
from support.table_engine import VOCAB, first_table, response_of

from mindspeed_rl.core.memory import MemoryOwner
from mindspeed_rl.rl.reward_model import add_model_scores
from mindspeed_rl.rl.rollouts import RolloutBatch
from mindspeed_rl.rl.update import refresh_reference
from mindspeed_rl.samples.sample_metrics import sample_metrics

REWARDS: dict[int, float | None] = {0: 1.0, 1: 0.0, 2: None, 3: 1.0, 4: 0.5, 5: 0.0}
TABLE = torch.linspace(-1.0, 2.0, VOCAB)


def with_scorer(folder: Path, flags: str = "") -> TableRun:
    model = f"--reward-model-hf-checkpoint {folder} --reward-model-weight 0.5 --micro-batch-size 4 "
    run = make_run(folder, model + flags, REWARDS)
    run.set_models(reward_model=TableScorer(TABLE))
    return run


def refresh(run: TableRun, step: int) -> None:
    interval = run.parts.config.rl.ref_update_interval
    refresh_reference(run.parts.models, run.parts.scheduler, interval, step)


def collected(run: TableRun) -> RolloutBatch:
    found = run.generate()
    return add_model_scores(run.parts, found, run.build(found.samples).placed)


def test_the_score_of_the_last_token_is_added(tmp_path: Path) -> None:
    """Weighted, to every sample that is trained on and to every one that is reported."""
    run = with_scorer(tmp_path)
    found = collected(run)
    for samples in (found.samples, found.generated):
        assert len(samples) == 6
        for i, sample in enumerate(samples):
            score = float(TABLE[response_of(i)[-1]])
            reward = REWARDS[i]
            if reward is None:  # an abstained reward stays one
                assert math.isnan(sample.reward) and sample.parts[1] == pytest.approx(score)
            else:
                assert sample.reward == pytest.approx(reward + 0.5 * score)
                assert sample.parts == pytest.approx((reward, score))
    values = sample_metrics(found.generated, run.parts.reward_names, 3)
    scores = [float(TABLE[response_of(i)[-1]]) for i in range(6)]
    assert values["reward/reward_model"] == pytest.approx(sum(scores) / 6)
    assert run.parts.reward_names == ("format", "reward_model")


def test_the_policy_becomes_the_reference(tmp_path: Path) -> None:
    """Every two steps, and a checkpoint keeps it then."""
    run = make_run(tmp_path, "--grpo-kl-beta 0.1 --ref-update-interval 2")
    policy, reference = run.policy, run.reference
    assert run.parts.models.companions(2) == {"reference": reference}
    with torch.no_grad():
        policy.table += 1.0
    refresh(run, 1)
    assert torch.equal(reference.table, first_table())
    refresh(run, 2)
    assert torch.equal(reference.table, policy.table)
    assert reference.num_writes == 1, "else its copy on the host would come back later"
    with torch.no_grad():
        policy.table += 1.0
    assert not torch.equal(reference.table, policy.table), "a copy, not the same memory"


def test_the_first_reference_stays(tmp_path: Path) -> None:
    run = make_run(tmp_path, "--grpo-kl-beta 0.1")
    with torch.no_grad():
        run.policy.table += 1.0
    refresh(run, 2)
    assert torch.equal(run.reference.table, first_table())
    assert run.parts.models.companions(0) == {}


@pytest.mark.parametrize("flags", ["", "--grpo-kl-beta 0.1 --ref-update-interval 1"])
def test_memory_comes_for_its_use_alone(tmp_path: Path, flags: str) -> None:
    run = with_scorer(tmp_path, flags)
    moves = run.moves_of((MemoryOwner.REWARD_MODEL, MemoryOwner.REFERENCE))
    collected(run)
    assert moves == ["reward_model here", "reward_model away"]
    moves.clear()
    refresh(run, 1)
    assert moves == (["reference here", "reference away"] if flags else [])
