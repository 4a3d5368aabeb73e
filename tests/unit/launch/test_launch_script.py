"""What pretrain_scripts/launch.sh refuses and says before it starts a launcher."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = f'source "{ROOT}/pretrain_scripts/launch.sh"; launch "$@"'
# Stands for torchrun alone: everything else runs.
INTERPRETER = """#!/usr/bin/env bash
if [[ "$*" == *mindspeed_rl.launch.bound_store* ]]; then echo "started: $*"; exit 0; fi
exec {python} "$@"
"""


def started(
    tmp_path: Path, *arguments: str, first: str = ":", **variables: str
) -> subprocess.CompletedProcess[str]:
    """What a recipe does; ``first`` is what its interpreter does before anything else."""
    python = tmp_path / "python"
    text = INTERPRETER.format(python=shlex.quote(sys.executable))
    python.write_text(text.replace("\n", f"\n{first}\n", 1))
    python.chmod(0o755)
    own = {"NPUS_PER_NODE": "4", "NNODES": "1", "NODE_RANK": "0", "MASTER_PORT": "6000"}
    kept = {k: v for k, v in os.environ.items() if k not in ("MASTER_ADDR", "RANK", "WORLD_SIZE")}
    environment = kept | own | variables | {"PYTHON": str(python), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["bash", "-euc", SCRIPT, "launch", *arguments],
        env=environment, capture_output=True, text=True, timeout=60, cwd=tmp_path,
    )  # fmt: skip


@pytest.mark.parametrize("address", [{}, {"MASTER_ADDR": ""}])
def test_several_nodes_need_an_address(tmp_path: Path, address: dict[str, str]) -> None:
    refused = started(tmp_path, "some.module", NNODES="2", **address)
    assert refused.returncode == 2 and "started" not in refused.stdout
    assert "MASTER_ADDR" in refused.stderr and "NNODES=2" in refused.stderr


def test_a_node_says_once_for_whom_it_waits(tmp_path: Path) -> None:
    remote = started(tmp_path, "some.module", NNODES="2", NODE_RANK="1", MASTER_ADDR="10.0.0.1")
    assert "started" in remote.stdout and "--master-addr 10.0.0.1 " in remote.stdout
    assert remote.stderr.count("2 nodes at 10.0.0.1:6000") == 1 and "warning" not in remote.stderr
    here = started(tmp_path, "some.module", NNODES="2", MASTER_ADDR="127.0.0.1")
    assert "started" in here.stdout and "warning: MASTER_ADDR=127.0.0.1" in here.stderr
    alone = started(tmp_path, "some.module")
    assert "--master-addr localhost " in alone.stdout and alone.stderr == ""


@pytest.mark.parametrize("variables", [{}, {"MAX_RESTARTS": "3", "ELASTIC_MIN_NODES": "1"}])
def test_a_replay_is_not_started_again(tmp_path: Path, variables: dict[str, str]) -> None:
    """Numbers that differ once would differ again; a run is started by the starter of the node."""
    again = "mindspeed_rl.launch.restart --max-restarts 3"
    python = 'if [[ "$*" == *mindspeed_rl.launch.restart* ]]; then echo "started: $*"; exit 0; fi'
    given = [] if variables else ["--max-restarts", "3", "--elastic-min-nodes=1"]
    found = [
        started(tmp_path, "some.module", *given, *more, first=python, **variables).stdout
        for more in ([], ["--replay", "7", "out"])
    ]
    assert again in found[0] and "--elastic-min-nodes 1" in found[0]
    assert "started: " in found[1] and "mindspeed_rl.launch.restart" not in found[1]
    assert found[1].rstrip().endswith("--replay 7 out")


def test_a_wrong_flag_is_told_once_before_the_launcher(tmp_path: Path) -> None:
    refused = started(tmp_path, "mindspeed_rl.train_rl", "--grpo-promts-per-step", "3")
    assert refused.returncode == 2 and "started" not in refused.stdout
    assert "--grpo-prompts-per-step" in refused.stderr and "Traceback" not in refused.stderr
    assert refused.stderr.count("unknown flag") == 1


def test_right_flags_pass_the_check_for_the_ranks_of_the_node(tmp_path: Path) -> None:
    """Three ranks are no multiple of the layout's two, four are; the check starts none."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1 = ", "answer": "2"}\n' * 4)
    subprocess.run(
        [sys.executable, str(ROOT / "tools/make_tiny_model.py"), "--output", "model"],
        cwd=tmp_path, check=True, capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    flags = [
        *("--perform-rl-step", "--hf-checkpoint", "model", "--prompt-data", "rows.jsonl"),
        *("--output-dir", "out", "--train-iters", "1", "--grpo-prompts-per-step", "4"),
        *("--tensor-model-parallel-size", "2", "--make-vocab-size-divisible-by", "8"),
        *("--rollout-max-response-length", "4", "--reward-function", "numeric_match"),
        *("--rollout-kv-cache-gb", "0.01", "--max-prompt-length", "16"),
    ]
    right = started(tmp_path, "mindspeed_rl.train_rl", *flags)
    assert right.returncode == 0 and "started" in right.stdout, right.stderr
    wrong = started(tmp_path, "mindspeed_rl.train_rl", *flags, NPUS_PER_NODE="3")
    assert wrong.returncode == 2 and "--tensor-model-parallel-size" in wrong.stderr
    assert "started" not in wrong.stdout


def test_a_dry_run_without_the_model_says_whose_config_it_reads(tmp_path: Path) -> None:
    script = f'NNODES=1; source "{ROOT}/pretrain_scripts/launch.sh"; config_of "$@"'
    absent = str(tmp_path / "absent")

    def config(directory: str, *flags: str) -> tuple[str, str]:
        done = subprocess.run(
            ["bash", "-euc", script, "config_of", directory, "qwen2.5-7b", *flags],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout.strip(), done.stderr

    published, told = config(absent, "--rl-dry-run")
    assert Path(published).is_file() and absent in told and published in told
    assert config(absent) == (absent, "")
    assert config(str(tmp_path), "--rl-dry-run") == (str(tmp_path), "")
