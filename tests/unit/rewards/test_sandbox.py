"""What a sandboxed program reaches, tried from inside: as root and not, with namespaces and not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest
from support.jobs import ROOT
from support.sandbox_attacks import attack

from mindspeed_rl.rewards import sandbox
from mindspeed_rl.rewards.sandbox import Restrictions, SandboxLimits, probe
from mindspeed_rl.rewards.seccomp import Allowed, filter_program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")
LIMITS = SandboxLimits(10.0, 256 << 20, 8, 1 << 20)
_NOBODY = 65534
_SYSTEM_PYTHON = "/usr/bin/python3.11"  # root's own interpreter is closed to others


@pytest.fixture(scope="module")
def here() -> Restrictions:
    found = probe(LIMITS)
    if found.left_open:
        pytest.skip(f"this machine leaves {found.left_open} open")
    return found


def test_a_program_reaches_nothing_outside(here: Restrictions) -> None:
    assert attack(here) == []


def test_without_namespaces_the_filter_holds_the_rest(here: Restrictions) -> None:
    """As in a container that forbids them."""
    bare = Restrictions(counted=False, namespaces=False, files=True, calls=True)
    assert not bare.left_open
    assert attack(bare) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.skipif(not Path(_SYSTEM_PYTHON).exists(), reason=f"no {_SYSTEM_PYTHON}")
@pytest.mark.parametrize("namespaces", [True, False])
def test_as_another_user_than_root(here: Restrictions, namespaces: bool) -> None:
    restrictions = Restrictions(False, namespaces, files=True, calls=True)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chown(folder, _NOBODY, _NOBODY)
        done = subprocess.run(
            [_SYSTEM_PYTHON, "-B", ROOT / "tests/support/sandbox_attacks.py",
             json.dumps(asdict(restrictions))],
            env={"PYTHONPATH": str(ROOT), "TMPDIR": folder}, user=_NOBODY, group=_NOBODY,
            extra_groups=[], capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_the_attacks_are_real() -> None:
    """Where nothing is closed they get through; each fence holds some of them."""
    nothing = Restrictions(counted=False, namespaces=False, files=False, calls=False)
    open_to = set(attack(nothing))
    assert open_to >= {
        "reads_a_file", "writes_a_file", "removes_a_file", "kills", "speaks_tcp",
        "speaks_to_a_path", "hides_memory", "outlives_its_parent", "changes_modes",
        "changes_times", "ends_processes", "leaves_a_process", "takes_processes",
    }  # fmt: skip
    assert nothing.left_open == ("network", "files", "processes")


def test_a_setting_that_leaves_something_open_says_so() -> None:
    for files in (False, True):
        for calls in (False, True):
            found = Restrictions(True, True, files=files, calls=calls)
            assert bool(found.left_open) is not (files and calls)
            assert ("OPEN" in found.describe()) is not (files and calls)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_filter_fits_the_kernel_and_is_of_its_machine(machine: str) -> None:
    program = filter_program(Allowed(False, False, False), machine)
    assert len(program) % 8 == 0 and 100 < len(program) // 8 < 4096
    assert program != filter_program(Allowed(True, True, True), machine)
    assert filter_program(Allowed(False, False, False), "riscv64") == b""


def test_the_folder_of_a_program_is_private_and_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    real = sandbox._run

    def look(command: list[str], stdin: str, folder: Path, *rest: object) -> sandbox.Ended:
        seen.append((folder.stat().st_mode & 0o777, folder.stat().st_uid))
        seen_folders.append(folder)
        return real(command, stdin, folder, *rest)  # type: ignore[arg-type]

    seen_folders: list[Path] = []
    monkeypatch.setattr(sandbox, "_run", look)
    old = os.umask(0)
    try:
        sandbox.run_python(
            ["-c", "open('left', 'w')"], "", {}, LIMITS, Restrictions(False, False, False, False)
        )
    finally:
        os.umask(old)
    assert seen == [(0o700, os.getuid())] and not seen_folders[0].exists()
