"""The quickstart refuses what is wrong at its start."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_a_quickstart_on_several_nodes_needs_a_common_port():
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
    done = subprocess.run(
        ["bash", str(ROOT / "pretrain_scripts" / "quickstart.sh")],
        env=alone | {"NNODES": "2"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == ""
    assert "MASTER_ADDR and MASTER_PORT" in done.stderr


def quickstart(tmp_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run it with this interpreter instead of the one that setup_env.sh would install."""
    scripts = tmp_path / "pretrain_scripts"
    if not scripts.exists():
        scripts.mkdir()
        shutil.copy(ROOT / "pretrain_scripts" / "quickstart.sh", scripts)
        for name in ("setup_env.sh", "check_package.sh"):
            (scripts / name).write_text(f"#!/bin/sh\necho {sys.executable}\n")
            (scripts / name).chmod(0o755)
        (tmp_path / "tools").symlink_to(ROOT / "tools")
    return subprocess.run(
        ["bash", str(scripts / "quickstart.sh"), "--output", str(tmp_path / "out"), *flags],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_a_wrong_flag_ends_the_quickstart_before_data_and_warm_start(tmp_path):
    done = quickstart(tmp_path, "--control", "bogus")
    assert done.returncode == 2, done.stderr
    assert "--rl-control" in done.stderr and "Traceback" not in done.stderr
    assert "warm start" not in done.stdout
    assert list((tmp_path / "out").iterdir()) == []


def test_a_quickstart_tells_what_it_replaces_and_a_refused_one_replaces_nothing(tmp_path):
    out = tmp_path / "out"
    (out / "rl").mkdir(parents=True)
    (out / "model").mkdir()
    for name in ("rl/summary.json", "model/config.json"):
        (out / name).write_text("of the first run")
    refused = quickstart(tmp_path, "--sead", "1")
    assert refused.returncode == 2 and "--seed" in refused.stderr
    assert (out / "model" / "config.json").read_text() == "of the first run"
    # The data of the second one cannot be written: it ends before its warm start.
    (out / "data").write_text("no folder")
    second = quickstart(tmp_path)
    assert second.returncode and f"replacing the results of {out}" in second.stdout
    assert "vocab_size" in (out / "model" / "config.json").read_text()
    assert not list(out.glob("new_model*"))
