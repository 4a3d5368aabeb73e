"""A student learns the quickstart's task from a teacher alone, without any reward.

Real megatron-core and real vLLM on two ranks. Teacher and student are warm starts of one tiny
model: the teacher's is long, the student's short.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from make_task_data import generate_task, write_jsonl
from support.jobs import ROOT
from support.whole_runs import rows_of, run_entry, train_rl, write_inputs

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

REWARD = ROOT / "pretrain_scripts" / "rewards_digit_sort.py"
ADAM = "--clip-grad 1.0 --adam-beta2 0.95 --weight-decay 0.0 --make-vocab-size-divisible-by 8"


def warm_start(folder: Path, steps: int, name: str) -> None:
    """A supervised run of so many steps, exported to the folder ``name``."""
    flags = (
        f"--hf-checkpoint model --platform cpu --sft-data sft.jsonl --train-iters {steps} "
        "--global-batch-size 64 --micro-batch-size 64 --lr 2e-3 --lr-warmup-iters 20 "
        f"--output-dir {name}-run --export-hf {name} {ADAM}"
    )
    ended = run_entry(folder, flags.split(), entry="pretrain")
    assert set(ended.returncodes) == {0}, ended.output[-4000:]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with teacher, student, prompts and held-out prompts."""
    folder = write_inputs(tmp_path_factory.mktemp("distillation"), 4000, heldout=200)
    write_jsonl(folder / "sft.jsonl", generate_task("digit_sort", 4000, seed=1))
    warm_start(folder, 300, "teacher")
    warm_start(folder, 60, "student")
    return folder


def evaluations(rows: list[dict[str, Any]]) -> list[float]:
    return [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]


def distil(folder: Path, output: str, *flags: str, model: str = "student") -> Path:
    common = (
        f"--hf-checkpoint {model} --eval-prompt-data heldout.jsonl "
        f"--reward-function {REWARD}:sorted_digits --max-prompt-length 16 "
        "--rollout-max-response-length 7 --vllm-max-num-seqs 256 --use-distributed-optimizer "
        f"--rl-preset distillation --teacher-hf-checkpoint teacher --micro-batch-size 128 {ADAM}"
    )
    train_rl(folder, [*common.split(), *flags], output=output, limit_s=600.0)
    return folder / output


def test_a_student_reaches_nine_tenths_of_its_teacher(world: Path) -> None:
    """By the exact KL; the reward is measured and trains nothing.

    Measured: teacher 0.87 to 0.93 by processor, student 0.49 before, 0.86 after 55 steps.
    """
    short = (
        "--train-iters", "1", "--grpo-prompts-per-step", "2", "--grpo-group-size", "1",
        "--lr", "0.0",
    )  # fmt: skip
    teacher = evaluations(rows_of(distil(world, "as-teacher", *short, model="teacher")))[0]
    rows = rows_of(
        distil(
            world, "full", "--teacher-kl", "full", "--train-iters", "110", "--lr", "1e-3",
            "--lr-warmup-iters", "5", "--grpo-prompts-per-step", "64", "--grpo-group-size", "4",
            "--eval-interval", "22", "--lr-decay-style", "linear",
        )
    )  # fmt: skip
    before, *later = evaluations(rows)
    after = max(later)  # single ones vary by 0.1
    assert teacher > 0.8 and before < 0.7 * teacher
    assert after >= 0.9 * teacher, (before, after, teacher)
    steps = [row for row in rows if "distillation/reverse_kl" in row]
    assert len(steps) == 110
    assert steps[-1]["distillation/reverse_kl"] < 0.2 * steps[0]["distillation/reverse_kl"]
    assert all(row["loss/policy"] == 0.0 for row in steps), "no reward is trained on"


def test_sampled_tokens_teach_without_memory_on_the_device(world: Path) -> None:
    """Teacher and trainer leave for the rollouts; what is owned is what was predicted."""
    rows = rows_of(
        distil(
            world, "sampled", "--train-iters", "12", "--lr", "1e-3", "--lr-warmup-iters", "3",
            "--grpo-prompts-per-step", "64", "--grpo-group-size", "4", "--rl-offload", "all",
        )
    )  # fmt: skip
    steps = [row for row in rows if "distillation/reverse_kl" in row]
    assert all(row["memory/rollout/teachers_bytes"] == 0 for row in steps)
    owned = steps[-1]["memory/rollout_owned_bytes"] - steps[-1]["memory/rollout/samples_bytes"]
    assert owned == steps[-1]["memory/rollout_predicted_bytes"]
    assert all(row["forward/teachers"] == 1 and row["forward/old"] == 0 for row in steps)
    distance = [row["distillation/reverse_kl"] for row in steps]
    assert sum(distance[-3:]) < 0.9 * sum(distance[:3]), distance
