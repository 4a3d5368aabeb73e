"""Two runs cannot have one folder; a run that is gone leaves no lock."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer

import pytest

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.launch.run_lock import lock_folders, read_note, refuse_living_run, release

HOLDER = """
import sys
from mindspeed_rl.launch.run_lock import lock_folders, release
lock_folders({"--save": sys.argv[1]}, "results")
print("locked", flush=True)
if sys.stdin.readline():
    release()
"""


@contextmanager
def other_run(folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        yield process
        process.kill()


@pytest.fixture(autouse=True)
def nothing_held() -> Iterator[None]:
    yield
    release()


def test_a_folder_of_a_living_run_is_refused_by_name(tmp_path: Path) -> None:
    with other_run(tmp_path) as process:
        with pytest.raises(UsageError, match=f"--save .* in use .*process {process.pid} on "):
            lock_folders({"--save": str(tmp_path)}, "results")
        with pytest.raises(UsageError, match=f"--load .* still goes on .*process {process.pid}"):
            refuse_living_run("--load", str(tmp_path))
        note = read_note(tmp_path)
        assert note is not None and note.output_dir == str(Path("results").resolve())


def test_the_lock_of_a_killed_run_is_taken_over_and_told(tmp_path: Path) -> None:
    with other_run(tmp_path) as process:
        process.kill()
        process.wait()
        (line,) = lock_folders({"--save": str(tmp_path)}, "results")
        assert f"process {process.pid}" in line
    again = "from mindspeed_rl.launch.run_lock import lock_folders; import sys\n"
    again += "lock_folders({'--save': sys.argv[1]}, 'x')"
    refused = subprocess.run(
        [sys.executable, "-c", again, str(tmp_path)], capture_output=True, text=True
    )
    assert "UsageError" in refused.stderr, "reading the old note must not have unlocked"


def test_a_restart_waits_for_the_lock_of_a_machine_that_is_lost(tmp_path: Path) -> None:
    """A file server frees it some time after the machine is gone."""
    with other_run(tmp_path) as process:
        with pytest.raises(UsageError, match="in use"):
            lock_folders({"--save": str(tmp_path)}, "results", wait_s=0.2)
        freed = Timer(0.7, process.kill)
        freed.start()
        (line,) = lock_folders({"--save": str(tmp_path)}, "results", wait_s=30.0)
        assert freed.finished.is_set() and f"process {process.pid}" in line


def test_a_run_that_ended_well_leaves_no_trace(tmp_path: Path) -> None:
    with other_run(tmp_path) as process:
        process.communicate("end\n", timeout=30)
    assert read_note(tmp_path) is None
    refuse_living_run("--load", str(tmp_path))
    folders = {"--save": str(tmp_path), "--output-dir": str(tmp_path / "new" / "out")}
    assert lock_folders(folders, "results") == [] and (tmp_path / "new" / "out").is_dir()
    assert lock_folders(folders, "results") == [], "this process has it already"
    refuse_living_run("--load", str(tmp_path))


def test_a_refused_start_leaves_the_note_that_it_found(tmp_path: Path) -> None:
    """The next start tells nobody of it, but still of a run that was killed before."""
    lock_folders({"--save": str(tmp_path)}, "refused")
    release(refused=True)
    assert read_note(tmp_path) is None
    with other_run(tmp_path) as process:
        process.kill()
        process.wait()
        lock_folders({"--save": str(tmp_path)}, "refused")
        release(refused=True)
        note = read_note(tmp_path)
        assert note is not None and note.pid == process.pid
        (line,) = lock_folders({"--save": str(tmp_path)}, "results")
        assert f"process {process.pid}" in line


def test_a_folder_that_cannot_be_made_is_refused_by_its_flag() -> None:
    """Not even root makes a folder in /proc."""
    with pytest.raises(UsageError, match=r"--output-dir /proc/x: .*cannot be made"):
        lock_folders({"--output-dir": "/proc/x"}, "results")
