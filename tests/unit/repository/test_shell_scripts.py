"""Every shell script is clean to shellcheck, and stops at its first failure."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = [
    *sorted((ROOT / "pretrain_scripts").rglob("*.sh")),
    *sorted((ROOT / "tests").rglob("*.sh")),
    ROOT / ".ci" / "run",
]


def test_shellcheck_finds_nothing() -> None:
    beside = Path(sys.executable).with_name("shellcheck")
    binary = str(beside) if beside.exists() else shutil.which("shellcheck")
    if binary is None:
        pytest.skip("shellcheck is not installed; it is in the section dev of versions.cfg")
    done = subprocess.run([binary, *map(str, SCRIPTS)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_stops_at_a_failure(script: Path) -> None:
    text = script.read_text()
    if text.startswith("# shellcheck shell=bash"):  # sourced by others
        return
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in text
