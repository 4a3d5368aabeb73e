"""A run with every model there is: policy, critic, reference, reward model.

Real megatron-core and real vLLM on two ranks: Qwen3-MoE with expert parallelism, everything leaves
for the rollouts, layers are recomputed, routing is replayed, the reference is refreshed; resumed.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from make_task_data import generate_task, write_jsonl
from make_tiny_model import write_tiny_model
from support.jobs import TorchrunJob, free_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

REWARD = """
def digits(request):
    return sum(c.isdigit() for c in request.response) / (1 + len(request.response))
"""
FLAGS = [
    "--hf-checkpoint",
    "model",
    "--platform",
    "cpu",
    "--prompt-data",
    "train.jsonl",
    "--output-dir",
    "out",
    "--reward-function",
    "reward.py:digits",
    "--make-vocab-size-divisible-by",
    "8",
    "--max-prompt-length",
    "16",
    "--rollout-max-response-length",
    "7",
    "--train-iters",
    "3",
    "--grpo-prompts-per-step",
    "4",
    "--grpo-group-size",
    "4",
    "--micro-batch-size",
    "3",
    "--global-batch-size",
    "8",
    "--grpo-iterations",
    "2",
    "--lr",
    "3e-3",
    "--expert-model-parallel-size",
    "2",
    "--rollout-tp",
    "2",
    "--rollout-ep",
    "2",
    "--recompute-granularity",
    "full",
    "--recompute-method",
    "uniform",
    "--recompute-num-layers",
    "1",
    "--rl-routing-replay",
    "trainer",
    "--rl-offload",
    "all",
    "--reward-model-hf-checkpoint",
    "scorer",
    "--reward-model-weight",
    "0.5",
    "--grpo-kl-beta",
    "0.01",
    "--ref-update-interval",
    "2",
    "--rl-advantage-estimator",
    "gae",
    "--critic-lr",
    "1e-3",
    "--save",
    "save",
    "--save-interval",
    "2",
]
# Equal in a run that was not interrupted and in one that was.
COMPARED = (
    "reward/mean", "reward/reward_model", "routing/agreement", "loss/policy", "loss/kl",
    "value/loss", "value/explained_variance", "value/grad_norm", "optimizer/grad_norm",
)  # fmt: skip


def run(folder: Path, *more: str) -> dict[int, dict[str, Any]]:
    """Metrics by step."""
    target = ["-m", "mindspeed_rl.train_rl"]
    with TorchrunJob(folder, target, [*FLAGS, *more], num_ranks=2, port=free_port()) as job:
        ended = job.end(200.0)
    assert ended.returncodes == (0,), ended.output
    rows = map(json.loads, (folder / "out" / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row for row in rows if "optimizer/skipped" in row}


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
    write_tiny_model(tmp_path / "model", family="qwen3_moe")
    write_scorer(tmp_path / "model", tmp_path / "scorer")
    write_jsonl(tmp_path / "train.jsonl", generate_task("digit_sort", 64, seed=0))
    (tmp_path / "reward.py").write_text(REWARD)
    whole = run(tmp_path)
    assert sorted(whole) == [1, 2, 3]
    for step, row in whole.items():
        assert 0.5 < row["routing/agreement"] < 1.0, "routers drift, and are replayed"
        assert row["reward/reward_model"] != 0.0 and row["value/loss"] > 0.0
        # optimizer states come with the first update
        for border in ("train", "rollout") if step > 1 else ("rollout",):
            owned = row[f"memory/{border}_owned_bytes"]
            assert owned == row[f"memory/{border}_predicted_bytes"], border
    assert whole[3]["loss/kl"] < 0.5 * whole[2]["loss/kl"], "the reference was refreshed"
    shutil.rmtree(tmp_path / "save" / "iter_0000003")
    resumed = run(tmp_path, "--load", "save")
    for name in COMPARED:
        assert resumed[3][name] == whole[3][name], name
