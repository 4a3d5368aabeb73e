"""The script for Slurm in docs/cluster.md, with stand-ins for Slurm's commands and the recipe."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.pages import blocks

RECIPE = "pretrain_scripts/grpo_qwen3_235b_a22b_a3.sh"
COMMANDS = {
    # as srun on two nodes: a task each, which get no signal from here; the first decides
    "srun": """
for node in 1 0; do
    SLURM_NODEID=$node "${@:2}" &
done
wait $!
""",
    "scontrol": """
if [[ "$1" == requeue ]]; then echo "$2" >> requeued; else echo node0; fi
""",
}
# ENDS is an exit code, or that the run goes on until it gets a signal and has saved.
RECIPE_TEXT = """
save() {
    sleep 0.3
    echo "$STEPS" > "$CKPT_SAVE_DIR/latest_checkpointed_iteration.txt"
}
(( NODE_RANK == 1 )) || trap 'touch signalled; save; exit 0' TERM
echo "$*" > "arguments$NODE_RANK"
(( NODE_RANK == 0 )) || exit 0
if [[ "$ENDS" == signal ]]; then
    while :; do sleep 0.05; done
fi
save
exit "$ENDS"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    page = [b.text for b in blocks() if b.page == "cluster.md" and "#SBATCH" in b.text]
    assert len(page) == 1 and RECIPE in page[0]
    saved = "CKPT_SAVE_DIR=/scratch/run/checkpoints"
    assert saved in page[0]
    (tmp_path / "job.sh").write_text(page[0].replace(saved, f"CKPT_SAVE_DIR={tmp_path}"))
    for name, text in [*COMMANDS.items(), (RECIPE, RECIPE_TEXT)]:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}")
        path.chmod(0o755)
    yield tmp_path


def start(folder: Path, ends: str, steps: int) -> subprocess.Popen[str]:
    """Start the script as Slurm does on the first node."""
    own = {"ENDS": ends, "STEPS": str(steps)}
    slurm = {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "4711"}
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.Popen(
        ["bash", "job.sh"], cwd=folder, env=os.environ | own | slurm | path, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def requeued(folder: Path) -> list[str]:
    note = folder / "requeued"
    return note.read_text().split() if note.exists() else []


@pytest.mark.parametrize(("steps", "again"), [(120, ["4711"]), (200, [])])
def test_a_job_is_queued_again_while_steps_are_left(folder: Path, steps: int, again: list[str]):
    """A run whose time is over ends with 0 as well as one that is done."""
    job = start(folder, "0", steps)
    assert (job.communicate(timeout=30)[0], job.returncode) == ("", 0)
    assert requeued(folder) == again
    for node in (0, 1):
        assert "--exit-duration-in-mins 1420" in (folder / f"arguments{node}").read_text()


def test_the_signal_of_the_script_reaches_the_run_and_is_waited_for(folder: Path):
    job = start(folder, "signal", 120)
    deadline = time.monotonic() + 30
    while not (folder / "arguments0").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)  # to the shell alone, as with --signal=B:
    assert (job.communicate(timeout=30)[0], job.returncode) == ("", 0)
    assert (folder / "signalled").exists()
    assert requeued(folder) == ["4711"]


def test_a_run_that_failed_is_not_queued_again(folder: Path):
    job = start(folder, "3", 120)
    assert (job.communicate(timeout=30)[0], job.returncode) == ("", 3)
    assert requeued(folder) == []
