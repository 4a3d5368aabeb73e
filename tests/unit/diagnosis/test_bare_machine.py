"""On a machine without packages the doctor and the dry run say what is missing, in their words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.utils import canonicalize_name
from support.architecture import ROOT
from support.published import PUBLISHED

from mindspeed_rl.diagnosis.facts import canonical_name

# Python as if some packages were not installed.
_WITHOUT = """
import sys, runpy, importlib.util
gone = sys.argv[1].split(",")
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in gone:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Gone())
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in gone else real(name, package)
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__")
"""


def run(gone: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _WITHOUT, gone, *words],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@given(st.text(st.sampled_from("aZ-_.9")))
def test_names_of_packages_are_compared_as_pip_does(name: str) -> None:
    assert canonical_name(name) == canonicalize_name(name)


def test_the_doctor_names_the_package_that_it_lacks() -> None:
    done = run("packaging,numpy,torch", "mindspeed_rl.doctor", "--platform", "cpu")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "RED   packaging" in done.stdout


@pytest.mark.parametrize(("gone", "code"), [("packaging,torch", 0), ("numpy,torch", 2)])
def test_a_dry_run_needs_numpy_alone(gone: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(PUBLISHED["qwen2.5-7b"].read_text())
    flags = ["--hf-checkpoint", str(tmp_path), "--prompt-data", "x.jsonl", "--train-iters", "2"]
    flags += ["--rl-dry-run", "--rl-world-size", "8", "--tensor-model-parallel-size", "4"]
    done = run(gone, "mindspeed_rl.train_rl", *flags, "--rollout-tp", "4")
    assert "Traceback" not in done.stderr
    assert done.returncode in ((0, 3) if not code else (code,)), done.stderr
    if code:
        assert "--rl-dry-run needs the package numpy: pip install numpy" in done.stderr
