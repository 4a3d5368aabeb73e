"""Whole runs that train adapters: the task is learned, the base stays, runs can be resumed.

Real megatron-core and real vLLM on two ranks, from a short warm start of the tiny model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from make_task_data import generate_task, write_jsonl
from safetensors.torch import load_file
from support.jobs import ROOT
from support.whole_runs import comparable_rows, rows_of, run_entry, train_rl, write_inputs

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

REWARD = ROOT / "pretrain_scripts" / "rewards_digit_sort.py"
ADAM = "--clip-grad 1.0 --adam-beta2 0.95 --weight-decay 0.0 --make-vocab-size-divisible-by 8"
RANK, ALPHA = 8, 16


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with prompts, held-out prompts and a student of a supervised run."""
    folder = write_inputs(tmp_path_factory.mktemp("lora"), 4000, heldout=200)
    write_jsonl(folder / "sft.jsonl", generate_task("digit_sort", 4000, seed=1))
    flags = (
        "--hf-checkpoint model --platform cpu --sft-data sft.jsonl --train-iters 60 "
        "--global-batch-size 64 --micro-batch-size 64 --lr 2e-3 --lr-warmup-iters 20 "
        f"--output-dir student-run --export-hf student {ADAM}"
    )
    ended = run_entry(folder, flags.split(), entry="pretrain")
    assert not any(ended.returncodes), ended.output[-4000:]
    return folder


def train_adapters(folder: Path, output: str, *flags: str) -> Path:
    common = (
        f"--hf-checkpoint student --reward-function {REWARD}:sorted_digits --max-prompt-length 16 "
        f"--rollout-max-response-length 7 --vllm-max-num-seqs 256 --micro-batch-size 128 {ADAM} "
        f"--lora-rank {RANK} --lora-alpha {ALPHA} --lr 1e-3 --lr-warmup-iters 5 "
        "--lr-decay-style constant --grpo-prompts-per-step 64"
    )
    train_rl(folder, [*common.split(), *flags], output=output, limit_s=600.0)
    return folder / output


def test_adapters_learn_the_task(world: Path) -> None:
    """The reward rises, the KL is to the base, and export and adapters are one model.

    Measured: accuracy 0.49 before and 0.595 after, sampled reward 0.25 and 0.35.
    """
    output = train_adapters(
        world, "learns", "--train-iters", "80", "--grpo-group-size", "8",
        "--eval-interval", "80", "--grpo-kl-beta", "0.001", "--use-distributed-optimizer",
        "--rl-offload", "all",
        "--eval-prompt-data", "heldout.jsonl", "--export-hf", "learned",
    )  # fmt: skip
    rows = rows_of(output)
    steps = [row for row in rows if "loss/policy" in row]
    before, *_, after = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    assert after > before + 0.05, (before, after)
    rewards = [row["reward/mean"] for row in steps]
    assert sum(rewards[-10:]) > sum(rewards[:10]) + 0.5, rewards
    assert steps[0]["loss/kl"] == pytest.approx(0.0, abs=1e-6), "B is 0 at the start"
    assert steps[-1]["loss/kl"] > 0.01
    assert all("memory/rollout/reference_bytes" not in row for row in steps)
    owned = steps[-1]["memory/rollout_owned_bytes"] - steps[-1]["memory/rollout/samples_bytes"]
    assert owned == steps[-1]["memory/rollout_predicted_bytes"]
    base, exported = (
        load_file(world / name / "model.safetensors") for name in ("student", "learned")
    )
    adapters = load_file(world / "learned-adapter" / "adapter_model.safetensors")
    for name, weight in base.items():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        if (first := adapters.get(f"{key}.lora_A.weight")) is not None:
            second = adapters[f"{key}.lora_B.weight"]
            merged = weight + ALPHA / RANK * second @ first
            torch.testing.assert_close(exported[name], merged)
            assert not torch.equal(exported[name], weight)
        else:
            assert torch.equal(exported[name], weight), name
    config = json.loads((world / "learned-adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == [
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    ]


def test_a_resumed_run_equals_the_uninterrupted_one(world: Path) -> None:
    """Tensor parallelism with sequence parallelism; all numbers of the metrics."""
    layout = (
        "--tensor-model-parallel-size", "2", "--sequence-parallel", "--grpo-kl-beta", "0.1",
        "--grpo-group-size", "4",
    )  # fmt: skip
    whole = train_adapters(world, "whole", *layout, "--train-iters", "4")
    half = (*layout, "--save", "save")
    train_adapters(world, "first", *half, "--train-iters", "2")
    rest = train_adapters(world, "second", *half, "--train-iters", "4", "--load", "save")
    assert by_step(rest) == {n: row for n, row in by_step(whole).items() if n > 2}


def by_step(output: Path) -> dict[int, dict[str, Any]]:
    return {row["step"]: row for row in comparable_rows(output) if "loss/policy" in row}
