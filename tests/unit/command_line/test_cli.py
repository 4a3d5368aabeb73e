"""The console script: each command is the module of its name."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from mindspeed_rl import cli

ROOT = Path(__file__).resolve().parents[3]


def run(*words: str) -> tuple[int, str, str]:
    code = "from mindspeed_rl.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"}, cwd=ROOT,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_the_help_names_all_commands_and_their_modules() -> None:
    status, out, _ = run("--help")
    assert status == 0
    for name, command in cli.COMMANDS.items():
        assert f"  {name} " in out and f"python -m {command.module}" in out
        assert find_spec(command.module) is not None


@pytest.mark.parametrize("words", [(), ("trane",)])
def test_a_wrong_command_is_told_with_those_that_exist(words: tuple[str, ...]) -> None:
    status, out, error = run(*words)
    assert (status, out) == (2, "")
    assert (
        "train, plan, pretrain, score, convert, rollouts, doctor, recipes" in error
        and error.count("\n") == 1
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("train --xyzzy", "mindspeed_rl.train_rl: error: +unknown flag --xyzzy"),
        ("pretrain --xyzzy", "mindspeed_rl.pretrain: error: +unknown flag --xyzzy"),
        ("score --xyzzy", "mindspeed_rl.score: error: +unknown flag --xyzzy"),
        ("convert --xyzzy", "convert_checkpoint: unknown flag --xyzzy"),
        ("rollouts /nonexistent", "rollouts_page: /nonexistent: no such folder"),
        ("recipes --xyzzy", "mindspeed-rl recipes: --xyzzy: give one folder"),
        ("doctor --preflight-timeout-s x", "mindspeed_rl.doctor: error: argument --preflight"),
    ],
)
def test_a_command_is_its_module(words: str, told: str) -> None:
    status, _, error = run(*words.split())
    assert status == 2
    told, _, mistake = told.partition("+")  # several mistakes have a line each
    assert told in error and mistake in error


def test_a_plan_is_a_dry_run() -> None:
    config = ROOT / "pretrain_scripts/models/configs/qwen2.5-7b.json"
    status, out, error = run(
        "plan", "--hf-checkpoint", str(config), "--prompt-data", "x.jsonl", "--rl-world-size", "8",
        "--train-iters", "2", "--rollout-kv-cache-gb", "4", "--rl-dry-run-machine", "a3", "--bf16",
        "--tensor-model-parallel-size", "4", "--use-distributed-optimizer",
    )  # fmt: skip
    assert status == 0, error
    assert "memory" in out
