"""A job that mends itself: killed, started again by launch.sh, it ends with the same numbers."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.jobs import ROOT, TorchrunJob, free_port, planted, processes_of, run_to_end
from support.spawn import run_command
from support.whole_runs import COMMON, comparable_rows, rows_of, write_inputs

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, prompts and a reward."""
    return write_inputs(tmp_path_factory.mktemp("restart"), 16)


def flags(name: str) -> list[str]:
    return [
        *COMMON, "--train-iters", "4", "--grpo-prompts-per-step", "4", "--grpo-group-size", "2",
        "--micro-batch-size", "4", "--lr", "1e-3", "--reward-function", "reward.py:digits",
        "--max-prompt-length", "24", "--vllm-max-num-seqs", "8", "--rl-max-logprob-diff", "0",
        "--rollout-max-response-length", "6", "--output-dir", name, "--save", f"{name}/save",
        "--save-interval", "2",
    ]  # fmt: skip


def launch(
    folder: Path, ranks: int, arguments: Sequence[str], fault: str = ""
) -> subprocess.CompletedProcess[str]:
    """What a recipe does, with the entry that has a planted fault."""
    script = f'source "{ROOT}/pretrain_scripts/launch.sh"; launch support.rl_driver "$@"'
    variables = {
        "NPUS_PER_NODE": str(ranks), "NNODES": "1", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "RESTART_BACKOFF_S": "0.1",
        "PYTHONPATH": f"{ROOT}:{ROOT}/tests:{ROOT}/tools", "TMPDIR": str(folder / "tmp"),
    }  # fmt: skip
    (folder / "tmp").mkdir(exist_ok=True)
    return run_to_end(
        ["bash", "-euc", script, "launch", *arguments], 500.0,
        variables | planted(fault, "train_rl"), cwd=folder,
    )  # fmt: skip


@pytest.fixture(scope="module")
def quiet(world: Path) -> list[dict[str, Any]]:
    """The metrics of the run that nothing disturbs."""
    run_command("mindspeed_rl.train_rl", flags("quiet"), 2, cwd=world)
    return comparable_rows(world / "quiet")


@pytest.mark.parametrize(
    ("name", "more", "step", "source"),
    [
        ("disk", [], 3, "killed-disk/save/iter_0000002"),
        ("memory", ["--peer-checkpoint-steps", "1"], 4, "the copies in memory"),
    ],
)
def test_a_killed_job_goes_on_and_ends_with_the_same_numbers(
    world: Path, quiet: list[dict[str, Any]], name: str, more: list[str], step: int, source: str
) -> None:
    """From its checkpoint, or from newer copies that its starter has kept: it repeats one step."""
    own = [*flags(f"killed-{name}"), *more, "--max-restarts", "2"]
    killed = launch(world, 2, own, f"1:train:{step}:kill")
    assert killed.returncode == 0, killed.stdout
    assert killed.stdout.count(f"restart 1 of 2 in 0.1 s: the job ended in step {step}: ") == 1
    assert "rank 1 in phase train" in killed.stdout
    assert f"resuming after step {step - 1} from {source}" in killed.stdout
    assert "restart 1: the next step was done " in killed.stdout
    assert comparable_rows(world / f"killed-{name}") == quiet
    rows = [row for row in rows_of(world / f"killed-{name}") if "reward/mean" in row]
    assert [row.get("run/restarts", 0.0) for row in rows] == [float(n >= step) for n in range(1, 5)]


def test_a_fault_that_comes_again_at_the_same_step_ends_the_job(world: Path) -> None:
    arguments = [*flags("again"), "--max-restarts", "5"]
    ended = launch(world, 1, arguments, "0:train:1:raise-always")
    assert ended.returncode != 0
    assert ended.stdout.count("the job ends: rank 0 in phase train: RuntimeError: planted") >= 2
    assert "no restart: the same fault came 2 times in a row at step 1" in ended.stdout
    assert "restart 2 of" not in ended.stdout


def test_a_run_that_is_asked_to_end_saves_after_its_step(world: Path) -> None:
    """SIGTERM at one of two ranks; what a batch queue kills, --load continues."""
    asked = [*flags("asked"), "--train-iters", "400", "--exit-signal-handler"]
    with TorchrunJob(world, ["-m", "mindspeed_rl.train_rl"], asked, fresh=True) as job:
        job.wait_for_text("grpo 2/400", 300.0)
        ranks = [
            pid for pid in processes_of(job.marker)
            if b"LOCAL_RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            and b"mindspeed_rl.train_rl" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]  # fmt: skip
        os.kill(ranks[0], signal.SIGTERM)
        ended = job.end(200.0)
    assert ended.returncodes == (0,), ended.output
    steps = [row["step"] for row in rows_of(world / "asked") if "reward/mean" in row]
    assert f"stopped after step {steps[-1]} of 400: SIGTERM reached 1 ranks" in ended.output
    assert (world / "asked" / "save" / f"iter_{steps[-1]:07d}" / "checkpoint.json").is_file()
