"""A run with every model there is: policy, critic, reference, reward model.

Real megatron-core and real vLLM on two ranks: Qwen3-MoE with expert parallelism, everything leaves
for the rollouts, layers are recomputed, routing is replayed, the reference is refreshed; resumed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.whole_runs import train_rl, write_inputs

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FLAGS = (
    "--reward-function reward.py:digits --max-prompt-length 16 --rollout-max-response-length 7 "
    "--train-iters 3 --grpo-prompts-per-step 4 --grpo-group-size 4 --micro-batch-size 3 "
    "--global-batch-size 8 --grpo-iterations 2 --lr 3e-3 "
    "--expert-model-parallel-size 2 --rollout-tp 2 --rollout-ep 2 "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
    "--rl-routing-replay trainer --rl-offload all "
    "--reward-model-hf-checkpoint scorer --reward-model-weight 0.5 "
    "--grpo-kl-beta 0.01 --ref-update-interval 2 --rl-advantage-estimator gae --critic-lr 1e-3 "
    "--save save --save-interval 2"
)
# Equal in a run that was not interrupted and in one that was.
COMPARED = (
    "reward/mean", "reward/reward_model", "routing/agreement", "loss/policy", "loss/kl",
    "value/loss", "value/explained_variance", "value/grad_norm", "optimizer/grad_norm",
)  # fmt: skip


def write_scorer(model: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        scorer = AutoModelForSequenceClassification.from_pretrained(
            model, num_labels=1, dtype=torch.float32
        )
    scorer.save_pretrained(folder)


def test_all_models_in_one_run_that_is_resumed(tmp_path: Path) -> None:
    write_inputs(tmp_path, 64, family="qwen3_moe")
    write_scorer(tmp_path / "model", tmp_path / "scorer")
    whole = {row["step"]: row for row in train_rl(tmp_path, FLAGS.split())}
    assert sorted(whole) == [1, 2, 3]
    for step, row in whole.items():
        assert 0.5 < row["routing/agreement"] < 1.0, "routers drift, and are replayed"
        assert row["reward/reward_model"] != 0.0 and row["value/loss"] > 0.0
        # optimizer states come with the first update
        for border in ("train", "rollout") if step > 1 else ("rollout",):
            # the tokens of the step's samples depend on the responses and are not predicted
            owned = row[f"memory/{border}_owned_bytes"] - row[f"memory/{border}/samples_bytes"]
            assert owned == row[f"memory/{border}_predicted_bytes"], border
    assert whole[3]["loss/kl"] < 0.5 * whole[2]["loss/kl"], "the reference was refreshed"
    shutil.rmtree(tmp_path / "save" / "iter_0000003")
    resumed = {row["step"]: row for row in train_rl(tmp_path, [*FLAGS.split(), "--load", "save"])}
    for name in COMPARED:
        assert resumed[3][name] == whole[3][name], name
