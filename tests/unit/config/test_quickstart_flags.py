"""The quickstart refuses what is wrong at its start."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def test_a_quickstart_on_several_nodes_needs_a_common_port():
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
    done = subprocess.run(
        ["bash", str(ROOT / "pretrain_scripts" / "quickstart.sh")],
        env=alone | {"NNODES": "2"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == ""
    assert "MASTER_ADDR and MASTER_PORT" in done.stderr


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--control", "bogus"], "--rl-control"),
        pytest.param(["--sead", "1"], "--seed", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_flag_ends_the_quickstart_before_data_and_warm_start(tmp_path, wrong, words):
    """With this interpreter instead of the one that setup_env.sh would install."""
    scripts = tmp_path / "pretrain_scripts"
    scripts.mkdir()
    shutil.copy(ROOT / "pretrain_scripts" / "quickstart.sh", scripts)
    for name in ("setup_env.sh", "check_package.sh"):
        (scripts / name).write_text(f"#!/bin/sh\necho {sys.executable}\n")
        (scripts / name).chmod(0o755)
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    done = subprocess.run(
        ["bash", str(scripts / "quickstart.sh"), "--output", str(tmp_path / "out"), *wrong],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert words in done.stderr and "Traceback" not in done.stderr
    assert "warm start" not in done.stdout
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]
