"""tools/compare_runs.py: what two equal runs may differ in, and nothing else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_rl.metrics.equality import computed, measures_machine

ROOT = Path(__file__).resolve().parents[3]


def write_run(
    folder: Path, *, reward: float = 0.5, step_s: float = 1.0, weights: bytes = b"w"
) -> Path:
    (folder / "hf").mkdir(parents=True)
    (folder / "hf" / "model.safetensors").write_bytes(weights)
    rows = [
        {"step": n, "reward/mean": reward, "loss": float("nan"), "time/step_s": step_s * n}
        for n in (1, 2)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def compare(*folders: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "compare_runs.py"), *map(str, folders)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_times_may_differ_and_nan_equals_nan(tmp_path: Path) -> None:
    done = compare(write_run(tmp_path / "a"), write_run(tmp_path / "b", step_s=7.0))
    assert done.returncode == 0, done.stdout
    assert re.findall(r"\d+", done.stdout) == ["2", "6", "1"], "rows, values, files of weights"


def test_the_last_bit_of_a_metric_and_of_a_weight_are_reported(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", reward=0.1 + 0.2)
    second = write_run(tmp_path / "b", reward=0.3, weights=b"v")
    done = compare(first, second)
    assert done.returncode == 1
    *metrics, weights, _ = done.stdout.splitlines()
    for number, line in enumerate(metrics, start=1):
        assert line.startswith(f"metrics.jsonl:{number}: reward/mean: ")
        assert "0.30000000000000004" in line and line.endswith("0.3")
    assert len(metrics) == 2 and weights.startswith("hf/model.safetensors")


def test_a_run_that_stopped_early_differs_and_an_empty_folder_is_none(tmp_path: Path) -> None:
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    rows = (second / "metrics.jsonl").read_text().splitlines()
    (second / "metrics.jsonl").write_text(rows[0] + "\n")
    done = compare(first, second)
    assert done.returncode == 1 and "metrics.jsonl: 2 rows and 1" in done.stdout
    done = compare(first, tmp_path)
    assert done.returncode == 2 and str(tmp_path) in done.stderr


@pytest.mark.parametrize(
    ("name", "of_the_machine"),
    [
        ("time/step_s", True), ("time_max/reshard_s", True), ("throughput/scored_early", True),
        ("memory/train_used_bytes", True), ("reshard/gb_per_s", True), ("eval/hard/time_s", True),
        ("x/wait_ms", True), ("reshard/bytes_sent", False), ("reward/mean", False),
        ("optimizer/grad_norm", False), ("rollout/steps", False), ("sampling/rounds", False),
        ("rollout/draft_tokens", True), ("rollout/steps_per_token", True),
        ("mismatch/max_abs_logprob", False), ("eval/accuracy", False), ("step", False),
    ],
)  # fmt: skip
def test_what_measures_the_machine_is_recognised_by_unit_and_chapter(
    name: str, of_the_machine: bool
) -> None:
    assert measures_machine(name) is of_the_machine


def test_names_of_numbers_that_are_not_finite_are_compared_like_others() -> None:
    row = {"step": 2, "rollout/draft_tokens": None, "kl": None}
    assert computed(row | {"nonfinite": ["rollout/draft_tokens"]}) == {"step": 2, "kl": None}
    both = ["kl", "rollout/draft_tokens"]
    assert computed(row | {"nonfinite": both}) == {"step": 2, "kl": None, "nonfinite": ["kl"]}
