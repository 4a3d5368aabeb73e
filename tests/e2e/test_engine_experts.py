"""The engine's experts in the trainer: real vLLM, real megatron-core, two ranks.

The engine computes in bf16 and the trainer in fp32, so some tokens go to other experts; with the
engine's the two agree better on the probabilities of what was sampled.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from make_task_data import generate_task, write_jsonl
from make_tiny_model import write_tiny_model
from support.jobs import TorchrunJob, free_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FLAGS = (
    "--hf-checkpoint model --platform cpu --prompt-data train.jsonl --reward-function length "
    "--make-vocab-size-divisible-by 8 --max-prompt-length 16 --rollout-max-response-length 24 "
    "--train-iters 2 --grpo-prompts-per-step 4 --grpo-group-size 8 --micro-batch-size 4 --lr 1e-3 "
    "--expert-model-parallel-size 2 --rollout-tp 1 --rollout-dp 2 --rollout-ep 2 "
    "--rollout-dtype bfloat16 --rl-sync-check-tol 1 --output-dir"
)


def run(folder: Path, name: str, *more: str) -> list[dict[str, Any]]:
    """Metrics of the two steps."""
    target = ["-m", "mindspeed_rl.train_rl"]
    flags = [*FLAGS.split(), name, *more]
    with TorchrunJob(folder, target, flags, num_ranks=2, port=free_port()) as job:
        ended = job.end(200.0)
    assert ended.returncodes == (0,), ended.output
    rows = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "optimizer/skipped" in row]


def test_the_experts_of_the_engine_are_replayed(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", family="qwen3_moe")
    write_jsonl(tmp_path / "train.jsonl", generate_task("digit_sort", 64, seed=0))
    own = run(tmp_path, "own")
    theirs = run(tmp_path, "theirs", "--rl-routing-replay", "rollout")
    assert len(own) == len(theirs) == 2
    assert own[0]["reward/mean"] == theirs[0]["reward/mean"], "the same samples at first"
    for row in theirs:
        assert 0.9 < row["routing/engine_agreement"] < 1.0
    for name, share in (("mean_abs_logprob", 1.0), ("max_abs_logprob", 0.5), ("k3", 0.5)):
        assert theirs[0][f"mismatch/{name}"] < share * own[0][f"mismatch/{name}"], name
