"""The reward pool against functions that hang, eat memory and die."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.rewards_support import (
    USER_FILE,
    children,
    is_running,
    make_pool,
    make_requests,
    wait_for,
    worker_pids,
)

from mindspeed_rl.core.cores import bind_process, release_process
from mindspeed_rl.rewards import RewardRequest
from mindspeed_rl.rewards.types import RewardError, RewardResult, RewardStatus
from mindspeed_rl.rewards.worker_process import MAX_TOLD, worker_environment


@pytest.fixture(autouse=True)
def no_child_left() -> Iterator[None]:
    """Every test must leave no child behind, zombies included."""
    before = children()
    yield
    assert not children() - before


@pytest.mark.parametrize("function", ["hangs_on_bad", "hangs_in_c_on_bad"])
def test_a_stuck_sample_costs_its_limit_only(
    function: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed at its limit, the others scored, order kept, pool back to size, logged."""
    responses = ["good"] * 40
    responses[0] = responses[17] = "bad" + "!" * 5000
    with make_pool(f":{function}", workers=2, timeout_s=1.0, timeout_score=-0.5) as pool:
        before = set(worker_pids(pool))
        with caplog.at_level(logging.WARNING):
            results = pool.score(make_requests(*responses))
        after = set(worker_pids(pool))
        assert len(after) == 2 and len(before & after) <= 1
        assert all(map(is_running, after)) and not any(map(is_running, before - after))
        assert {r.reward for r in pool.score(make_requests(*["good"] * 8))} == {1.0}
    assert [r.sample_id for r in results] == list(range(100, 140))
    assert [r.status for r in results] == ["timeout" if "bad" in r else "ok" for r in responses]
    assert {r.reward for r in results if r.status == "timeout"} == {-0.5}
    assert {r.reward for r in results if r.status == "ok"} == {1.0}
    messages = sorted(record.getMessage() for record in caplog.records)
    assert len(messages) == 2
    assert "sample 100" in messages[0] and "sample 117" in messages[1]
    assert "bad!!!" in messages[0] and len(messages[0]) < 600


def test_the_limit_is_per_sample() -> None:
    """A batch may take longer than the limit of a sample."""
    with make_pool(":sleeps", timeout_s=3.0) as pool:
        results = pool.score(make_requests(*["0.7"] * 5))
    assert {r.status for r in results} == {"ok"}


def test_loading_the_functions_does_not_count(tmp_path: Path) -> None:
    """Neither at the start nor when a worker was replaced."""
    file = tmp_path / "slow.py"
    file.write_text(
        "import time\n"
        "time.sleep(1.6)\n"
        "def score(request):\n"
        "    time.sleep(float(request.response))\n"
        "    return 1.0\n"
    )
    with make_pool(f"{file}:score", timeout_s=1.5) as pool:
        results = pool.score(make_requests("0", "60", "0"))
    assert [r.status for r in results] == ["ok", "timeout", "ok"]


def test_a_function_that_vanishes_stops_the_run(tmp_path: Path) -> None:
    file = Path(shutil.copy(USER_FILE, tmp_path))
    with make_pool(f"{file}:hangs_on_bad", timeout_s=0.2) as pool:
        file.unlink()
        with pytest.raises(ValueError, match="--reward-function"):
            pool.score(make_requests("bad", "good"))
        with pytest.raises(RuntimeError):
            pool.score(make_requests("good"))


def test_a_killed_worker_takes_its_programs_and_files_along(tmp_path: Path) -> None:
    note = tmp_path / "note"
    with make_pool(":leaves_much_behind", timeout_s=60.0, batch_timeout_s=0.1) as pool:
        with pool.scoring() as scoring:
            scoring.add(*make_requests("bad", answer=str(note)))
            assert wait_for(note.exists, 20.0)
            assert [r.status for r in scoring.finish()] == ["timeout"]
        program, folder = note.read_text().split()
        assert wait_for(lambda: not is_running(int(program)) and not Path(folder).exists(), 20.0)
        pool.batch_timeout_s = 60.0
        pool.score(make_requests("good", answer=str(note)))
        folder = note.read_text().split()[1]
        assert Path(folder).exists()
    assert not Path(folder).parent.exists()


def test_batch_limit_times_out_what_is_open() -> None:
    """Those that hang and those that nobody began with; what was scored stays scored."""
    with make_pool(":hangs_on_bad", workers=2, batch_timeout_s=0.5, timeout_s=60.0) as pool:
        before = set(worker_pids(pool))
        with pool.scoring() as scoring:
            for request in make_requests("good", "good", *["bad"] * 8, "good"):
                scoring.add(request)
            assert wait_for(lambda: scoring.num_done == 2, 20.0)
            results = scoring.finish()
        assert [r.status for r in results] == ["ok"] * 2 + ["timeout"] * 9
        assert {r.reward for r in results if r.status == "timeout"} == {0.0}
        assert [r.sample_id for r in results] == list(range(100, 111))
        pool.batch_timeout_s = 60.0
        assert [r.status for r in pool.score(make_requests("good"))] == ["ok"]
        assert wait_for(lambda: not any(map(is_running, before)), 20.0)


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS")
def test_an_allocation_above_the_limit_is_an_error() -> None:
    """10 GB against a limit of 1 GiB; the worker is replaced, its other samples scored."""
    responses = ["good"] * 5 + ["bad"] + ["good"] * 24
    with make_pool(":allocates_on_bad", memory_limit_gb=1.0) as pool:
        (before,) = worker_pids(pool)
        results = pool.score(make_requests(*responses))
        (after,) = worker_pids(pool)
    assert [r.status for r in results].count("ok") == 29
    assert (results[5].status, results[5].reward) == ("error", None)
    assert "MemoryError" in results[5].detail and "memory limit" in results[5].detail
    assert before != after
    assert {r.reward for r in results} == {before, after, None}


@pytest.mark.parametrize(
    ("function", "code"), [("dies_on_bad", 3), ("several_at_a_time", 3), ("segfaults_on_bad", -11)]
)
def test_a_dead_worker_costs_the_sample_that_killed_it(function: str, code: int) -> None:
    """Wherever it stands among those that a worker was given; never a 0, never an innocent one."""
    with make_pool(f":{function}", workers=2, max_error_rate=1.0) as pool:
        for bad in ([0], [3], [5, 7], [12, 13], [9, 20], [24]):
            responses = ["bad" if i in bad else "good" for i in range(25)]
            results = pool.score(make_requests(*responses))
            assert [r.sample_id for r in results] == list(range(100, 125))
            wanted = [("error", None) if i in bad else ("ok", 1.0) for i in range(25)]
            assert [(r.status, r.reward) for r in results] == wanted
            assert all(f"exit code {code}" in results[i].detail for i in bad)
            assert len(set(worker_pids(pool))) == 2 and all(map(is_running, worker_pids(pool)))


KILLED = """
import os, signal
from pathlib import Path

def score(request):
    note = Path({note!r} + request.response)
    if request.response == "always" or (request.response == "once" and not note.exists()):
        note.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0
"""


def test_a_sample_whose_worker_was_killed_is_scored_once_more(tmp_path: Path) -> None:
    """As by an operator, or the kernel for want of memory; a second time costs the sample."""
    file = tmp_path / "killed.py"
    file.write_text(KILLED.format(note=str(tmp_path / "note-")))
    responses = ["good", "once", "good", "always", "good"]
    with make_pool(f"{file}:score", max_error_rate=1.0) as pool:
        results = pool.score(make_requests(*responses))
    assert [r.reward for r in results] == [1.0, 1.0, 1.0, None, 1.0]
    assert "exit code -9" in results[3].detail and results[3].status == "error"


def test_workers_killed_at_rest_cost_no_sample() -> None:
    with make_pool(":length", workers=2) as pool:
        before = worker_pids(pool)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        assert wait_for(lambda: not any(map(is_running, before)), 20.0)
        assert {r.detail for r in pool.score(make_requests(*["good"] * 12))} == {""}
        assert not set(before) & set(worker_pids(pool))


def is_busy(pid: int) -> bool:
    """Whether a process runs on a processor: the idle ones sleep."""
    return psutil.Process(pid).status() == psutil.STATUS_RUNNING


def test_a_worker_that_does_not_read_blocks_nobody() -> None:
    """A stopped worker leaves the request in the socket; writing must not wait for it."""
    with make_pool(":length", timeout_s=1.5) as pool:
        os.kill(worker_pids(pool)[0], signal.SIGSTOP)
        results = pool.score(make_requests("x" * 5_000_000, "y"))
    assert [(r.status, r.reward) for r in results] == [("timeout", 0.0), ("ok", 1.0)]


def test_timeouts_leak_nothing() -> None:
    """Memory, file descriptors and processes are flat over 40 timeouts.

    A leak is a slope: the second half of the timeouts must not add to what the first half left.
    """
    this, children_before = psutil.Process(), children()
    with make_pool(":hangs_on_bad", workers=4, timeout_s=0.02, max_timeout_rate=1.0) as pool:
        pool.score(make_requests("bad", "bad"))
        fds_before, used = this.num_fds(), []
        for _ in range(4):
            results = pool.score(make_requests(*["bad"] * 10))
            assert [r.status for r in results] == ["timeout"] * 10
            used.append(this.memory_info().rss)
        assert used[3] - used[1] < 1 << 20, used
        assert this.num_fds() == fds_before
        assert children() - children_before == set(worker_pids(pool))
        assert len(worker_pids(pool)) == 4


def test_too_many_timeouts_end_the_run_with_their_flags() -> None:
    """Judged over twenty samples or more, so that a few slow ones of a small batch end nothing."""

    def results(first: int, *statuses: RewardStatus) -> list[RewardResult]:
        return [RewardResult(first + i, 0.0, {}, s, "slow") for i, s in enumerate(statuses)]

    with make_pool("format", max_timeout_rate=0.25) as pool:
        pool.check_error_rate(results(0, *["timeout"] * 5))  # a quarter of twenty
        pool.check_error_rate(results(5, *["ok"] * 15))
        pool.check_error_rate(results(20, *["timeout"] * 10, *["ok"] * 30))
        with pytest.raises(RewardError, match=r"--reward-max-timeout-rate 0\.25") as error:
            pool.check_error_rate(results(60, *["ok"] * 4, *["timeout"] * 6))
        assert "6 of 10" in str(error.value) and "sample 64:\nslow" in str(error.value)
        assert "--reward-timeout-s" in str(error.value)


def test_a_hanging_reward_ends_the_batch_once_its_share_is_certain(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """21 of 200 are above a tenth whatever the others do; each line once, then a number."""
    with make_pool(":hangs_on_bad", workers=2, timeout_s=0.05, max_timeout_rate=0.1) as pool:
        with (
            caplog.at_level(logging.WARNING),
            pytest.raises(RewardError, match="--reward-max-timeout-rate") as error,
        ):
            pool.score(make_requests(*["bad"] * 200))
        # it goes on; on a busy machine a good one may take longer than the limit, too
        assert 1.0 in {r.reward for r in pool.score(make_requests(*["good"] * 8))}
    failed, count = map(int, re.findall(r"(\d+) of (\d+)", str(error.value))[0])
    assert 21 <= failed == count < 150
    messages = [record.getMessage() for record in caplog.records]
    assert sum("worker is replaced" in message for message in messages) == MAX_TOLD
    assert len(messages) == MAX_TOLD + 1 and int(messages[-1].split()[0]) >= 21 - MAX_TOLD


def test_samples_to_come_may_still_bring_a_share_down() -> None:
    def results(*statuses: RewardStatus) -> list[RewardResult]:
        return [RewardResult(i, 0.0, {}, s, "slow") for i, s in enumerate(statuses)]

    with make_pool("format", max_timeout_rate=0.25) as pool:
        pool.check_error_rate(results(*["timeout"] * 25), to_come=75)
        pool.check_error_rate(results(*["timeout"] * 19), to_come=1)
        with pytest.raises(RewardError, match="26 of 26 rewards"):
            pool.check_error_rate(results(*["timeout"] * 26), to_come=74)
        pool.check_error_rate(results(*["timeout"] * 5, *["ok"] * 15))  # of the others no trace


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_workers_run_on_all_cores_where_their_rank_is_bound() -> None:
    """A rank that leads an engine scores for others as well."""
    before = sorted(os.sched_getaffinity(0))
    bind_process(before[-1:], os.environ)
    try:
        with make_pool("format") as pool:
            pool.score([RewardRequest(0, "", "", "", "stop", 1)])  # it has started
            (pid,) = worker_pids(pool)
            assert psutil.Process(pid).cpu_affinity() == before
            assert sorted(os.sched_getaffinity(0)) == before[-1:]
    finally:
        release_process(os.environ)
    assert sorted(os.sched_getaffinity(0)) == before


PARENT = """
import sys
from mindspeed_rl.config.rewards import RewardConfig
from mindspeed_rl.rewards import RewardPool, RewardRequest, RewardSettings
flags = RewardConfig(
    reward_function=(sys.argv[1] + ":hangs_on_bad",), reward_num_workers=2, reward_timeout_s=60
)
pool = RewardPool(RewardSettings(flags))
print(*(worker.pid for worker in pool.workers), flush=True)
if sys.argv[2] == "kill":
    pool.score([RewardRequest(0, "", "bad", "", "stop", 1)])  # one worker busy, one idle
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
@pytest.mark.parametrize("end", ["kill", "exit"])
def test_workers_end_with_their_parent(end: str) -> None:
    """SIGKILL of the parent mid-work, and an exit without close, leave no worker."""
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), str(USER_FILE), end],
        stdout=subprocess.PIPE,
        text=True,
        env=worker_environment(os.environ),  # able to import this package
    )
    assert parent.stdout is not None
    with parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        if end == "kill":
            assert wait_for(lambda: any(map(is_busy, pids)), 20.0)
            assert all(map(is_running, pids))
            parent.kill()
    assert wait_for(lambda: not any(map(is_running, pids)), 20.0)
