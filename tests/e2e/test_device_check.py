"""``tools/device_check.sh`` on a CPU, as a user starts it; and on a machine without vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.jobs import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

# Run by Python at its start: vLLM is not found, as where it is not installed.
WITHOUT_VLLM = """
from importlib.machinery import PathFinder

find = PathFinder.find_spec


def other(name, path=None, target=None):
    return None if name.partition(".")[0] == "vllm" else find(name, path, target)


PathFinder.find_spec = staticmethod(other)
"""


def checked(folder: Path, *flags: str, path: str = "") -> tuple[int, dict[str, Any], str]:
    """Exit code, stages by name, and what was printed."""
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
        "PYTHON": sys.executable
    }
    if path:
        environ["PYTHONPATH"] = path
    done = subprocess.run(
        ["bash", str(ROOT / "tools/device_check.sh"), "--platform", "cpu", "--output",
         str(folder), *flags],
        env=environ, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    record = json.loads((folder / "device_check.json").read_text())
    stages = {stage["stage"]: stage for stage in record["stages"]}
    assert str(Path.home()) + "/" not in (folder / "device_check.txt").read_text()
    return done.returncode, stages, done.stdout + done.stderr


def test_every_stage_runs_on_a_cpu(tmp_path: Path) -> None:
    code, stages, said = checked(tmp_path, "--task-steps", "2", "--warm-steps", "3")
    wrong = {name: stage["note"] for name, stage in stages.items() if stage["status"] != "ok"}
    assert code == 0 and not wrong, said
    assert len(stages) == 12
    figures = {name: stage["figures"] for name, stage in stages.items()}
    assert figures["trainer"]["tokens_per_s"] > 0 and figures["offload"]["moved_mib"] > 1
    assert figures["sync"]["moved_gb_per_s"] > 0
    assert figures["logprobs"]["largest_difference"] < 1e-4
    pauses = figures["pauses"]
    assert pauses["resumed"] == 24 and pauses["kept_tokens"] == 8 * (3 * 16 + 3 + 7 + 11 - 3)
    assert pauses["largest_difference"] < 1e-4
    assert figures["steps"]["steps"] == 3 and figures["task"]["steps"] == 2
    assert "12 of 12 stages ok, 0 failed, 0 skipped" in said


def test_the_trainer_runs_where_vllm_is_missing(tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(WITHOUT_VLLM)
    code, stages, said = checked(
        tmp_path, "--stages", "checksum", "trainer", "engine", path=str(hidden)
    )
    assert code == 0, said
    assert stages["trainer"]["status"] == stages["offload"]["status"] == "ok"
    for name in ("engine", "sync", "pauses", "logprobs"):
        assert stages[name]["status"] == "skipped"
        assert stages[name]["note"] == "vllm not installed (docs/install.md)"
