"""tools/bench/alternate.py: two jobs in turns, and their ratio."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from bench import alternate as alternate_tool
from bench.alternate import Turns, alternate, compare, main, parse, report, running
from support.rewards_support import wait_for

pytestmark = pytest.mark.slow


def test_ratios_are_of_all_seconds_by_all_steps() -> None:
    a = Turns([10, 30], [8.0, 8.0], 12.0)
    b = Turns([20, 20], [8.0, 12.0], 20.0)
    found = compare(a, b)
    assert found["seconds"] == pytest.approx((20 / 40) / (16 / 40))
    assert found["cpu_seconds"] == pytest.approx((20 / 40) / (12 / 40))
    # pairs of windows: 0.4 / 0.8 and 0.6 / (8 / 30)
    logs = math.log(0.5), math.log(0.6 * 30 / 8)
    assert found["standard_error"] == pytest.approx(1.25 * abs(logs[1] - logs[0]) / 2)


def test_what_windows_without_a_step_say() -> None:
    found = compare(Turns([0, 4], [8.0, 8.0], 1.0), Turns([3, 5], [8.0, 8.0], 1.0))
    assert found["seconds"] == 0.5 and math.isnan(found["standard_error"])
    with pytest.raises(RuntimeError, match="make --window longer"):
        compare(Turns([0], [8.0], 1.0), Turns([3], [8.0], 1.0))


def test_the_last_line_is_for_programs() -> None:
    text = report(Turns([10, 10], [8.0, 8.0], 12.0), Turns([20, 20], [8.0, 8.0], 6.0))
    result = json.loads(text.splitlines()[-1].removeprefix("RESULT "))
    assert result["ratio"]["seconds"] == 0.5 and result["b"]["cpu_seconds"] == 0.15
    assert "0.500 +- 0.000" in text


def _steps(path: Path) -> str:
    """A job of two processes that makes a step every 10 ms."""
    return f"while true; do date >> {path}; sleep 0.01; done & wait"


def test_while_one_makes_steps_the_other_makes_none(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    before = set(psutil.Process().children(recursive=True))
    with running([(str(f), _steps(f)) for f in files]) as jobs:
        assert wait_for(lambda: all(job.num_steps() > 1 for job in jobs), 60.0)
        alternate(jobs, window_s=0.5, rounds=3)
        stopped = [job.num_steps() for job in jobs]
        jobs[0].take_turn(0.5)
        assert jobs[0].num_steps() > stopped[0] and jobs[1].num_steps() == stopped[1]
        assert jobs[0].num_steps() - stopped[0] == jobs[0].turns.steps[-1]
        assert [len(job.turns.steps) for job in jobs] == [4, 3]
        assert all(n > 0 for job in jobs for n in job.turns.steps)
        inside = set(psutil.Process().children(recursive=True)) - before
        assert len(inside) >= 4
    psutil.wait_procs(inside, timeout=10)
    assert not any(process.is_running() for process in inside)


def _alive(marker: str) -> list[psutil.Process]:
    found = psutil.process_iter(["cmdline"])
    return [p for p in found if marker in " ".join(p.info["cmdline"] or ())]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_no_job_outlives_a_stopped_tool(tmp_path: Path, number: signal.Signals) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    jobs = [part for f in files for part in ("--job", str(f), _steps(f))]
    tool = subprocess.Popen(
        [sys.executable, alternate_tool.__file__, *jobs, "--window", "30"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert wait_for(lambda: all(f.exists() for f in files), 60.0) and tool.poll() is None
    tool.send_signal(number)
    assert tool.wait(timeout=30) == 1 and tool.stderr is not None
    assert tool.stderr.read().splitlines()[-1] == "stopped"
    assert not _alive(str(tmp_path))


def test_processes_of_a_launcher_that_is_gone_are_known(tmp_path: Path) -> None:
    file = tmp_path / "a"
    with running([(str(file), _steps(file))]) as (job,):
        assert wait_for(lambda: job.num_steps() > 1, 60.0)
        launcher, *others = job.processes()
        assert others
        launcher.kill()
        psutil.wait_procs([launcher], timeout=10)
        assert set(others) <= set(job.processes())
    assert not _alive(str(tmp_path))


def test_the_processor_time_of_a_child_that_ends_counts(tmp_path: Path) -> None:
    file = tmp_path / "a"
    busy = "import time; end = time.process_time() + 0.2\nwhile time.process_time() < end: pass"
    command = f"while true; do {sys.executable} -c '{busy}'; date >> {file}; done"
    with running([(str(file), command), (str(tmp_path / "b"), _steps(tmp_path / "b"))]) as jobs:
        assert wait_for(lambda: all(job.num_steps() > 1 for job in jobs), 60.0)
        alternate(jobs, window_s=2.0, rounds=2)
    turns = jobs[0].turns
    assert turns.cpu_seconds > 0.15 * (sum(turns.steps) - 1) > 0


def test_a_job_that_ends_is_told_with_its_output(tmp_path: Path) -> None:
    file = tmp_path / "a"
    jobs = [(str(file), "echo it broke; exit 3"), (str(tmp_path / "b"), _steps(tmp_path / "b"))]
    with pytest.raises(RuntimeError, match=r"ended \(3\)(.|\n)*it broke"):
        main([argument for job in jobs for argument in ("--job", *job)])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--job", "a", "x"], "give A and B"),
        (["--job", "a", "x", "--job", "a", "y"], "folder of its own"),
        (["--job", "a", "x", "--job", "b", "y", "--rounds", "0"], "--rounds"),
    ],
)
def test_mistakes(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(argv)
    assert said in capsys.readouterr().err
