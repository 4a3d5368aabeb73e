"""Whole RL runs: one that must learn in the hardest wiring there is, one in bfloat16.

Real megatron-core and real vLLM. The reward is the share of digits in the
response: an untrained model has some, so that no warm start is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.whole_runs import train_rl, write_inputs

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, the quickstart's prompts and a reward."""
    return write_inputs(tmp_path_factory.mktemp("learning"), 256)


def train(folder: Path, num_ranks: int, output: str, *flags: str) -> list[dict[str, Any]]:
    """The metrics of every step."""
    common = (
        "--reward-function reward.py:digits --use-distributed-optimizer --max-prompt-length 16 "
        "--rollout-max-response-length 7 --vllm-max-num-seqs 128"
    )
    return train_rl(folder, [*common.split(), *flags], output=output, num_ranks=num_ranks)


def test_off_policy_steps_on_tp2_pp2_learn(world: Path) -> None:
    """Four optimizer steps per RL step, a KL term, old log-probs by a pass, engines of two ranks.

    The trainer leaves memory for every rollout, and the engine's weights for every update.

    Measured: reward 0.03 -> 0.65, mismatch 1.2e-6.
    """
    steps = train(
        world, 4, "learn", "--tensor-model-parallel-size", "2",
        "--pipeline-model-parallel-size", "2", "--rollout-tp", "2", "--train-iters", "8",
        "--grpo-prompts-per-step", "16", "--grpo-group-size", "8", "--global-batch-size", "32",
        "--micro-batch-size", "32", "--grpo-kl-beta", "0.01", "--old-logprob", "recompute",
        "--lr", "5e-3", "--rl-offload", "all",
        "--vllm-max-num-batched-tokens", "130",  # prompts do not all fit into one engine step
    )  # fmt: skip
    assert len(steps) == 8
    away = ("parameters", "grad_buffers", "optimizer", "reference")
    assert all(step[f"memory/rollout/{name}_bytes"] == 0 for step in steps for name in away)
    assert steps[0]["memory/train/engine_weights_bytes"] == 0
    assert all(step["memory/train/samples_bytes"] > 0 for step in steps)
    for state in ("train", "idle", "sync", "rollout"):
        predicted = steps[-1][f"memory/{state}_predicted_bytes"]
        assert steps[-1][f"memory/{state}_owned_bytes"] == pytest.approx(predicted, rel=0.05)
    assert all(step["memory/train_peak_bytes"] > 0 for step in steps)
    assert max(step["mismatch/max_abs_logprob"] for step in steps) <= 1e-4
    rewards = [step["reward/mean"] for step in steps]
    assert rewards[0] < 0.1 and rewards[-1] > 0.3, rewards
    assert rewards[-1] > rewards[4] > rewards[0], rewards
    assert steps[-1]["policy/version"] == 32
    assert steps[-1]["loss/kl"] > steps[0]["loss/kl"] > 0.0
    assert min(step["policy/ratio_max_deviation"] for step in steps) > 0.01


def test_bfloat16_passes_its_own_checks(world: Path) -> None:
    """With the default tolerance of the probe, which measures about 4e-3 here."""
    steps = train(
        world, 1, "bf16", "--bf16", "--train-iters", "3", "--grpo-prompts-per-step", "4",
        "--grpo-group-size", "8", "--micro-batch-size", "32", "--lr", "5e-3",
    )  # fmt: skip
    assert len(steps) == 3
    mismatch = [step["mismatch/mean_abs_logprob"] for step in steps]
    assert min(mismatch) > 1e-4 and max(mismatch) < 0.05, mismatch
    assert all(step["optimizer/grad_norm"] > 0.0 for step in steps)
