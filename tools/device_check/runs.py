"""The stages that are whole entries of the product, as a user starts them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from make_task_data import generate_task, write_jsonl
from make_tiny_model import write_tiny_model

from device_check.child import Setting
from device_check.ranks import run_flags
from device_check.report import ROOT
from device_check.results import Notes, Recorder, StageFailed
from mindspeed_rl.diagnosis.packages import AREA as PACKAGES
from mindspeed_rl.diagnosis.rows import Status

REWARD = ROOT / "pretrain_scripts" / "rewards_digit_sort.py"
# As pretrain_scripts/quickstart.sh, on one rank.
_TRAIN = (
    *("--make-vocab-size-divisible-by", "8", "--use-distributed-optimizer", "--clip-grad", "1.0"),
    *("--adam-beta1", "0.9", "--adam-beta2", "0.95", "--weight-decay", "0.0"),
)
# From so many steps on the task has to learn: held-out accuracy must not end below its begin.
LEARNING_STEPS = 30
# Largest |log p(trainer) - log p(engine)| of a token. In fp32 rounding stays below a tenth of this;
# in bfloat16 it is twenty times the mean that rounding explains, and was not measured on a device.
HALF_WORST, FULL_WORST = 1.0, 1e-3
_SHOWN_STEPS = {
    "throughput/tokens_per_s": "tokens_per_s",
    "throughput/rollout_tokens_per_s": "rollout_tokens_per_s",
    "throughput/update_all_tokens_per_s": "update_all_tokens_per_s",
    "throughput/update_mfu": "update_mfu",
    "time/step_s": "step_s",
}


def doctor(setting: Setting, recorder: Recorder) -> None:
    """Run the doctor; its red findings, or packages that some runs lack, are the stage's note."""
    with recorder.stage("doctor") as notes:
        file = setting.folder / "doctor.json"
        words = ["mindspeed_rl.doctor", "--platform", setting.platform, "--json", str(file)]
        code = entry(words)
        if not file.exists():
            raise StageFailed(f"the doctor ended with exit code {code}")
        rows = json.loads(file.read_text())
        bad = [row for row in rows if row["status"] == Status.RED.value]
        notes.figures |= {"findings": len(rows), "red": len(bad)}
        if bad:
            raise StageFailed("; ".join(f"{row['what']} ({row['fix']})" for row in bad))
        if code:
            raise StageFailed(f"the doctor ended with exit code {code} and no red finding")
        lacking = [row for row in rows if row["status"] == Status.NOTE.value]
        notes.text = "; ".join(row["what"] for row in lacking if row["area"] == PACKAGES)


def entry(words: Sequence[str]) -> int:
    """Run a module of the product; what it prints is in the log of this process."""
    print(f"== python -m {' '.join(words)}", flush=True)
    return subprocess.run([sys.executable, "-m", *words], check=False).returncode


def require(words: Sequence[str], log: Path) -> None:
    """Run a module that must end well.

    Args:
        words: The module and its flags.
        log: File to which this process and what it starts print.

    Raises:
        StageFailed: It ended with another exit code than 0; says the reason that it gave.
    """
    if code := entry(words):
        printed = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        reasons = [line for line in printed.splitlines() if ": error: " in line]
        raise StageFailed(
            f"{words[0]} ended with exit code {code}: "
            + (reasons[-1].partition(": error: ")[2] if reasons else "its log has the reason")
        )


def steps(setting: Setting, recorder: Recorder) -> None:
    """Run three GRPO steps with random weights and fixed lengths."""
    with recorder.stage("steps") as notes:
        output = setting.folder / "steps"
        require(["mindspeed_rl.train_rl", *run_flags(setting), "--output-dir", str(output)],
                setting.folder / "steps.log")  # fmt: skip
        rows = metrics(output)
        last = rows[-1]
        notes.figures["steps"] = len(rows)
        notes.figures |= {shown: last[name] for name, shown in _SHOWN_STEPS.items() if name in last}


def metrics(output: Path) -> list[dict[str, Any]]:
    """Return the rows of the steps of a run."""
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "time/step_s" in row]


def task(setting: Setting, recorder: Recorder) -> None:
    """Warm a tiny model up and train it as the quickstart does, with fewer steps."""
    with recorder.stage("task") as notes:
        _task(setting, notes)


def _task(setting: Setting, notes: Notes) -> None:
    folder = setting.folder / "task"
    model = write_tiny_model(folder / "model")
    asked = setting.task_steps * 64
    for name, count, seed, split in (
        ("sft", 4000, 1000, "train"), ("rl", max(asked, 640), 2000, "train"),
        ("heldout", 200, 3000, "heldout"),
    ):  # fmt: skip
        write_jsonl(folder / f"{name}.jsonl", generate_task("digit_sort", count, seed, split))
    common = [*_TRAIN, "--platform", setting.platform, *(["--bf16"] if setting.half else [])]
    log = setting.folder / "task.log"
    require([
        "mindspeed_rl.pretrain", "--hf-checkpoint", str(model), *common,
        "--sft-data", str(folder / "sft.jsonl"), "--train-iters", str(setting.warm_steps),
        "--global-batch-size", "64", "--micro-batch-size", "64", "--lr", "2e-3",
        "--lr-warmup-iters", str(min(20, setting.warm_steps)), "--output-dir", str(folder / "warm"),
        "--export-hf", str(folder / "warm_hf"),
    ], log)  # fmt: skip
    require([
        "mindspeed_rl.train_rl", "--hf-checkpoint", str(folder / "warm_hf"), *common,
        "--prompt-data", str(folder / "rl.jsonl"),
        "--eval-prompt-data", str(folder / "heldout.jsonl"),
        "--train-iters", str(setting.task_steps), "--eval-interval", str(setting.task_steps),
        "--grpo-prompts-per-step", "64", "--grpo-group-size", "8", "--grpo-kl-beta", "0.0",
        "--micro-batch-size", "256", "--lr", "5e-4",
        "--lr-warmup-iters", str(min(10, setting.task_steps)),
        "--reward-function", f"{REWARD}:sorted_digits",
        "--max-prompt-length", "16", "--rollout-max-response-length", "7",
        "--rollout-kv-cache-gb", "0.0625", "--vllm-block-size", "32",
        "--vllm-max-num-seqs", "256", "--output-dir", str(folder / "rl"),
    ], log)  # fmt: skip
    rows = metrics(folder / "rl")
    summary = json.loads((folder / "rl" / "summary.json").read_text())
    notes.figures |= {
        "steps": len(rows),
        "reward_first": rows[0]["reward/mean"],
        "reward_last": rows[-1]["reward/mean"],
        "accuracy_before": summary["accuracy_before"],
        "accuracy_after": summary["accuracy_after"],
        "worst_mismatch": summary["worst_mismatch"],
        "step_s": rows[-1]["time/step_s"],
    }
    check_task(notes.figures, half=setting.half)


def check_task(figures: Mapping[str, float], *, half: bool) -> None:
    """Judge the figures of the task.

    Args:
        figures: Those of the stage.
        half: Whether trainer and engine computed in bfloat16.

    Raises:
        StageFailed: Trainer and engine disagree, or there was time to learn and nothing learned.
    """
    limit, worst = HALF_WORST if half else FULL_WORST, figures["worst_mismatch"]
    if not worst <= limit:
        raise StageFailed(
            f"log-probs of a token differ by {worst:.3g} between trainer and engine; up to "
            f"{limit:g} is fine"
        )
    steps, before, after = (figures[k] for k in ("steps", "accuracy_before", "accuracy_after"))
    if steps >= LEARNING_STEPS and not after >= before:
        raise StageFailed(
            f"held-out accuracy fell from {before:.3f} to {after:.3f} in {steps:.0f} steps"
        )
