"""Twenty updates of a run equal those of a plain trainer that replays its rollouts.

Real megatron-core and real vLLM on two ranks, pipeline-parallel, against transformers and torch.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.jobs import TorchrunJob, free_port
from support.plain_trainer import Recipe, dumped_steps, replay

from mindspeed_rl.data.tasks import generate_task, write_jsonl
from mindspeed_rl.data.tiny_model import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_STEPS, PROMPTS, GROUP = 10, 4, 4
RECIPE = Recipe(
    group_size=GROUP,
    samples_per_update=8,
    lr=1e-3,
    warmup=4,
    clip_grad=0.5,
    eps_lower=0.1,
    eps_upper=0.2,
    kl_beta=0.05,
    entropy_weight=0.01,
    weight_decay=0.1,
)
REWARD = """
def digits(request):
    return sum(c.isdigit() for c in request.response) / (1 + len(request.response))
"""


def run_job(folder: Path) -> None:
    write_tiny_model(folder / "model", family="llama")
    write_jsonl(folder / "train.jsonl", generate_task("digit_sort", 64, seed=0))
    (folder / "reward.py").write_text(REWARD)
    flags = [
        "--hf-checkpoint", "model", "--platform", "cpu", "--prompt-data", "train.jsonl",
        "--reward-function", "reward.py:digits", "--make-vocab-size-divisible-by", "8",
        "--pipeline-model-parallel-size", "2", "--max-prompt-length", "16",
        "--rollout-max-response-length", "7", "--output-dir", "out", "--export-hf", "out/hf",
        "--train-iters", str(NUM_STEPS), "--grpo-prompts-per-step", str(PROMPTS),
        "--grpo-group-size", str(GROUP), "--micro-batch-size", "3",
        "--global-batch-size", str(RECIPE.samples_per_update), "--lr", str(RECIPE.lr),
        "--lr-warmup-iters", str(RECIPE.warmup), "--clip-grad", str(RECIPE.clip_grad),
        "--weight-decay", str(RECIPE.weight_decay),
        "--grpo-clamp-eps-lower", str(RECIPE.eps_lower),
        "--grpo-clamp-eps-upper", str(RECIPE.eps_upper),
        "--grpo-kl-beta", str(RECIPE.kl_beta),
        "--grpo-entropy-term-weight", str(RECIPE.entropy_weight),
        "--log-rollouts", str(PROMPTS * GROUP), "--log-rollout-tokens",
    ]  # fmt: skip
    target = ["-m", "mindspeed_rl.train_rl"]
    with TorchrunJob(folder, target, flags, num_ranks=2, port=free_port()) as job:
        ended = job.end(200.0)
    assert ended.returncodes == (0,), ended.output


def test_a_plain_trainer_gets_the_same_weights(tmp_path: Path) -> None:
    """Measured: 1.0e-6 of the norm of a weight, 1.4e-5 of that of its change."""
    run_job(tmp_path)
    steps = dumped_steps(tmp_path / "out" / "rollouts.jsonl")
    assert [len(rows) for rows in steps] == [PROMPTS * GROUP] * NUM_STEPS
    weights, norms = replay(tmp_path / "model", steps, RECIPE)
    assert len(norms) == 20 and min(norms) < RECIPE.clip_grad < max(norms)
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    trained = [r for line in lines if "optimizer/grad_norm" in (r := json.loads(line))]
    means = [sum(pair) / 2 for pair in zip(norms[::2], norms[1::2], strict=True)]
    assert [r["optimizer/grad_norm"] for r in trained] == pytest.approx(means, rel=1e-4)
    assert max(r["policy/clip_fraction"] for r in trained) > 0.01, "the bounds must act"
    before = load_file(tmp_path / "model" / "model.safetensors")
    after = load_file(tmp_path / "out" / "hf" / "model.safetensors")
    assert after.keys() == weights.keys()

    def error(name: str, scale: torch.Tensor) -> float:
        return float((after[name] - weights[name]).norm() / scale.norm())

    of_weight = max(error(n, weights[n]) for n in weights)
    of_change = max(error(n, weights[n] - before[n]) for n in weights)
    assert of_weight <= 1e-5 and of_change <= 2e-4
