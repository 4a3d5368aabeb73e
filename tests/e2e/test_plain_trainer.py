"""Updates of a run, GRPO and PPO, equal those of a plain trainer that replays its rollouts.

Real megatron-core and real vLLM on two ranks, pipeline-parallel, against transformers and torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from make_task_data import generate_task, write_jsonl
from make_tiny_model import write_tiny_model
from safetensors.torch import load_file
from support.jobs import TorchrunJob, free_port
from support.plain_trainer import CriticRecipe, Recipe, dumped_steps, replay

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


PPO_STEPS = 6
PPO = CriticRecipe(lr=2e-3, value_clip=0.02, discount=0.98, trace_decay=0.9, warmup_steps=1)


def run_job(folder: Path, num_steps: int, recipe: Recipe, *more: str) -> list[dict[str, float]]:
    """Metrics of every step."""
    write_tiny_model(folder / "model", family="llama")
    write_jsonl(folder / "train.jsonl", generate_task("digit_sort", 64, seed=0))
    (folder / "reward.py").write_text(REWARD)
    flags = [
        "--hf-checkpoint", "model", "--platform", "cpu", "--prompt-data", "train.jsonl",
        "--reward-function", "reward.py:digits", "--make-vocab-size-divisible-by", "8",
        "--pipeline-model-parallel-size", "2", "--max-prompt-length", "16",
        "--rollout-max-response-length", "7", "--output-dir", "out", "--export-hf", "out/hf",
        "--train-iters", str(num_steps), "--grpo-prompts-per-step", str(PROMPTS),
        "--grpo-group-size", str(GROUP), "--micro-batch-size", "3",
        "--global-batch-size", str(recipe.samples_per_update), "--lr", str(recipe.lr),
        "--lr-warmup-iters", str(recipe.warmup), "--clip-grad", str(recipe.clip_grad),
        "--weight-decay", str(recipe.weight_decay),
        "--grpo-clamp-eps-lower", str(recipe.eps_lower),
        "--grpo-clamp-eps-upper", str(recipe.eps_upper),
        "--grpo-kl-beta", str(recipe.kl_beta),
        "--grpo-entropy-term-weight", str(recipe.entropy_weight),
        "--log-rollouts", str(PROMPTS * GROUP), "--log-rollout-tokens", *more,
    ]  # fmt: skip
    target = ["-m", "mindspeed_rl.train_rl"]
    with TorchrunJob(folder, target, flags, num_ranks=2, port=free_port()) as job:
        ended = job.end(200.0)
    assert ended.returncodes == (0,), ended.output
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    return [r for line in lines if "optimizer/skipped" in (r := json.loads(line))]


def errors(
    folder: Path, export: str, weights: Mapping[str, torch.Tensor], of_change: bool
) -> dict[str, float]:
    """Of every weight, relative to its norm or to that of its change; a new one started at 0."""
    before = load_file(folder / "model" / "model.safetensors")
    after = load_file(folder / "out" / export / "model.safetensors")
    assert after.keys() == weights.keys()
    result = {}
    for name, wanted in weights.items():
        scale = wanted - before.get(name, 0.0) if of_change else wanted
        result[name] = float((after[name] - wanted).norm() / scale.norm())
    return result


def test_a_plain_trainer_gets_the_same_weights(tmp_path: Path) -> None:
    """Measured: 1.0e-6 of the norm of a weight, 1.4e-5 of that of its change."""
    trained = run_job(tmp_path, NUM_STEPS, RECIPE)
    steps = dumped_steps(tmp_path / "out" / "rollouts.jsonl")
    assert [len(rows) for rows in steps] == [PROMPTS * GROUP] * NUM_STEPS
    found = replay(tmp_path / "model", steps, RECIPE)
    assert len(found.norms) == 20 and min(found.norms) < RECIPE.clip_grad < max(found.norms)
    means = [sum(pair) / 2 for pair in zip(found.norms[::2], found.norms[1::2], strict=True)]
    assert [r["optimizer/grad_norm"] for r in trained] == pytest.approx(means, rel=1e-4)
    assert max(r["policy/clip_fraction"] for r in trained) > 0.01, "the bounds must act"
    assert max(errors(tmp_path, "hf", found.weights, False).values()) <= 1e-5
    assert max(errors(tmp_path, "hf", found.weights, True).values()) <= 2e-4


def test_a_plain_trainer_gets_the_same_critic(tmp_path: Path) -> None:
    """Ten updates of the policy, twelve of the critic: two while the policy waits for it.

    All memory of both leaves for the rollouts and comes back. Measured, of both models: 5.5e-7 of
    the norm of a weight, 9.6e-6 of that of its change.
    """
    recipe = replace(RECIPE, kl_beta=0.0, clip_grad=1.0)
    trained = run_job(
        tmp_path, PPO_STEPS, recipe,
        "--rl-advantage-estimator", "gae", "--critic-lr", str(PPO.lr),
        "--value-clip", str(PPO.value_clip), "--gae-lambda", str(PPO.trace_decay),
        "--rl-gamma", str(PPO.discount), "--critic-warmup-steps", str(PPO.warmup_steps),
        "--critic-export-hf", "out/critic", "--rl-offload", "all",
    )  # fmt: skip
    steps = dumped_steps(tmp_path / "out" / "rollouts.jsonl")
    found = replay(tmp_path / "model", steps, recipe, PPO)
    assert (len(found.norms), len(found.critic_norms)) == (10, 12)
    means = [
        sum(p) / 2 for p in zip(found.critic_norms[::2], found.critic_norms[1::2], strict=True)
    ]
    assert [r["value/grad_norm"] for r in trained] == pytest.approx(means, rel=1e-4)
    assert max(r["value/clip_fraction"] for r in trained) > 0.01, "the bound must act"
    for export, weights in (("hf", found.weights), ("critic", found.critic)):
        assert max(errors(tmp_path, export, weights, False).values()) <= 1e-5
        assert max(errors(tmp_path, export, weights, True).values()) <= 2e-4
