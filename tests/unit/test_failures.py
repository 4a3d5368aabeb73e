"""What ranks tell each other about failures, and the sentences made of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.jobs import free_port
from support.rewards_support import wait_for
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from mindspeed_rl.bootstrap import World
from mindspeed_rl.orchestration.failures import (
    Beat,
    Failure,
    FailureBoard,
    Member,
    is_lost_connection,
    is_usage_error,
    lost_failure,
    rank_ranges,
    silent_ranks,
    whereabouts,
    write_error_file,
)
from mindspeed_rl.orchestration.launcher_report import tell_mistake
from mindspeed_rl.orchestration.launcher_store import connect, publish_usage_error
from mindspeed_rl.orchestration.limits import Limits
from mindspeed_rl.orchestration.watchdog import Watchdog
from mindspeed_rl.rewards import RewardSpec


def member(rank: int) -> Member:
    return Member(rank, node=rank // 2, pid=1000 + rank)


def beat(rank: int, count: int = 1, phase: str = "train", *, leaving: bool = False) -> Beat:
    return Beat(member(rank), count, phase, 2.0, leaving)


def failure(rank: int, text: str = "it broke") -> Failure:
    return Failure("error", member(rank), "train", text, member(rank))


@pytest.fixture
def boards() -> list[FailureBoard]:
    store = dist.HashStore()
    return [FailureBoard(store, member(rank), 3) for rank in range(3)]


def test_the_first_failure_stands_for_all(boards: list[FailureBoard]) -> None:
    assert boards[0].told() is None
    assert boards[1].tell(failure(1)) == failure(1)
    assert boards[2].tell(failure(2, "a consequence")) == failure(1)
    assert [board.told() for board in boards] == [failure(1)] * 3


def test_heartbeats_of_ranks_that_never_started_do_not_block(boards: list[FailureBoard]) -> None:
    boards[0].beat("train", 1.5)
    boards[0].beat("reshard", 0.5, leaving=True)
    expected = Beat(member(0), 2, "reshard", 0.5, True)
    assert boards[1].beats(range(3)) == {0: expected}
    assert boards[1].beat_of(2) is None


def test_silent_ranks_are_those_whose_count_stands_still() -> None:
    before = {0: beat(0), 1: beat(1), 2: beat(2)}
    after = {0: beat(0, 2), 1: beat(1), 2: beat(2, leaving=True), 3: beat(3)}
    assert silent_ranks(before, after) == [beat(1)]


def test_the_sentence_about_lost_ranks_names_process_node_and_phase() -> None:
    lost = lost_failure([beat(3, phase="generate"), beat(5)], "evidence", member(0))
    assert str(lost).startswith(
        "the job ends: rank 3 in phase generate: process 1003 on node 1 is gone; gone as well: "
        "ranks 5 (train) (evidence)."
    )
    assert lost.teller == member(0) and lost.exit_code == 1


def test_whereabouts_start_with_the_odd_one_out() -> None:
    late = replace(beat(3, phase="generate"), phase_s=30.4)
    beats = [late, *(beat(rank, phase="exchange") for rank in (0, 1, 2, 5))]
    assert whereabouts(beats) == "generate for 30 s: rank 3; exchange for 2 s: rank 0-2, 5"
    assert rank_ranges([beat(7), beat(9), beat(8), beat(1)]) == "1, 7-9"


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[gloo/pair.cc:537] Read error [::1]:1: Connection reset by peer"), True),
        (RuntimeError("Connection closed by peer [127.0.0.1]:4"), True),
        (BrokenPipeError("x"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("connection closed by peer"), False),
    ],
)
def test_lost_connections_are_told_from_failures(error: Exception, lost: bool) -> None:
    assert is_lost_connection(error) is lost


def caught(function: Callable[[], object]) -> BaseException:
    with pytest.raises(ValueError) as found:
        function()
    return found.value


def test_only_a_raise_statement_of_this_package_is_a_users_mistake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert is_usage_error(caught(lambda: RewardSpec.parse("file.py:score=heavy")))
    assert not is_usage_error(RuntimeError("x"))
    assert not is_usage_error(caught(lambda: json.loads("x"))), "a raise statement of a library"
    monkeypatch.setenv("RANK", "first")
    assert not is_usage_error(caught(World.from_environment)), "int() inside this package"


def test_torchruns_report_gets_the_first_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    write_error_file("the cause")
    write_error_file("a consequence")
    assert json.loads(file.read_text())["message"]["message"] == "the cause"
    report = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(file))
    assert report.message["extraInfo"]["py_callstack"] == "the cause"
    assert report.timestamp > 1_000_000_000


@pytest.fixture
def store_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks meet under a launcher that holds no store of its own."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


@pytest.mark.usefixtures("store_address")
def test_ranks_meet_under_another_launcher_before_they_join() -> None:
    first = FailureBoard(connect(0, 5.0), member(0), 2)
    second = FailureBoard(connect(1, 5.0), member(1), 2)
    told = Failure("usage", member(1), "start", "no such file", member(1))
    second.tell(told)
    assert first.told() == told


@pytest.mark.usefixtures("store_address")
def test_a_launcher_that_is_gone_is_said_so() -> None:
    with pytest.raises(RuntimeError, match=r"the launcher of the first node does not answer at"):
        connect(1, 1.0)
    publish_usage_error(World(1, 2, 0, 1), "a mistake", Limits(connect_s=1.0))  # and nobody waits


# A rank whose heartbeat comes too late: a lost connection is the first that it sees.
LATE_RANK = """
import time
from pathlib import Path

from mindspeed_rl.bootstrap import World
from mindspeed_rl.orchestration.limits import Limits
from mindspeed_rl.orchestration.watchdog import Watchdog

watchdog = Watchdog(World(0, 2, 0, 2), 600.0, "entry", Limits(patience_s=0.2, linger_s=0.1))
Path("ready").touch()
while not Path("go").exists():
    time.sleep(0.02)
watchdog.fail(RuntimeError("Connection closed by peer [127.0.0.1]:1"))
"""


@pytest.mark.parametrize("gone", ["this node", "the first node", "nobody"])
def test_neighbours_lost_with_a_launcher_are_not_the_cause(
    store_address: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gone: str
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, is_master=True, wait_for_workers=False)
    launcher = subprocess.Popen(
        ["sh", "-c", '"$0" -c "$1" & wait', sys.executable, LATE_RANK],
        cwd=tmp_path, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert wait_for((tmp_path / "ready").exists, 60.0) and launcher.poll() is None
    if gone == "this node":
        launcher.kill()
        launcher.wait()
    elif gone == "the first node":
        del store
    (tmp_path / "go").touch()
    assert launcher.stderr is not None
    said = launcher.stderr.read()  # until the rank ends
    launcher.wait()
    causes = [line for line in said.splitlines() if line.startswith("entry: the job ends: ")]
    cause = "RuntimeError: Connection" if gone == "nobody" else f"the launcher of {gone} is gone"
    assert len(causes) == 1 and cause in causes[0], said


class FakeTime:
    """A clock that only waits move, in the place of ``time`` and of an event that is never set."""

    def __init__(self, at: Callable[[float], None]) -> None:
        self.now, self._at = 0.0, at

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        self._at(self.now)
        return False


@pytest.mark.parametrize(
    ("phases_start_at", "told_at"),
    [
        ((), (1.0, 2.0, 3.0)),
        ((1.4,), (1.0, 1.5, 2.5)),  # at the next look
        ((0.3, 0.35, 0.4), (0.5, 1.5, 2.5)),  # brief ones between two looks cost one heartbeat
    ],
)
def test_a_heartbeat_is_due_after_an_interval_or_when_the_phase_is_another(
    monkeypatch: pytest.MonkeyPatch,
    phases_start_at: tuple[float, ...],
    told_at: tuple[float, ...],
) -> None:
    waiting = list(phases_start_at)
    watched = Watchdog.__new__(Watchdog)  # without a store and threads

    def go_on(now: float) -> None:
        while waiting and waiting[0] <= now:
            watched._now = (f"phase {len(waiting)}", waiting.pop(0), 600.0)

    clock = FakeTime(go_on)
    monkeypatch.setattr("mindspeed_rl.orchestration.watchdog.time", clock)
    watched._limits = Limits(interval_s=1.0, look_s=0.25)
    watched._now, watched._left = ("start", 0.0, 600.0), clock  # type: ignore[assignment]
    beats = []
    for _ in told_at:
        watched._rest(watched._now)
        beats.append(clock.now)
    assert beats == pytest.approx(told_at)


class DeafStore:
    """A board whose store never answers: its machine lost power."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_: threading.Event().wait()


def test_a_rank_that_ends_does_not_wait_for_a_store_without_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its guard no longer watches by then."""
    monkeypatch.setattr("mindspeed_rl.orchestration.watchdog._ANSWER_S", 0.05)
    watched = Watchdog.__new__(Watchdog)
    watched._board = DeafStore()  # type: ignore[assignment]
    watched._limits, watched._me, watched._world = Limits(), member(0), World(0, 2, 0, 2)
    watched._launcher, watched._now = os.getppid(), ("train", 0.0, 600.0)
    assert watched._tell(failure(0)) == failure(0)
    assert watched._find_cause(range(2), "a lost connection") is None
    assert watched._late("train", 700.0, 600.0).text == "exceeded --phase-timeout-s 600 (700 s)"
    said: list[str] = []
    monkeypatch.setattr(watched, "_leave_alone", said.append)
    watched._leave_if_orphaned()
    assert said == ["the launcher of the first node is gone (no answer within 0.05 s)"]


def test_the_report_of_the_launcher_repeats_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As torchrun reads what a failed process left; without a launcher it is only printed."""
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    tell_mistake("train_rl: error: --lr x")
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    tell_mistake("train_rl: error: --lr x")
    failed = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))
    report = ChildFailedError("train_rl", {0: failed})
    assert "traceback : train_rl: error: --lr x" in str(report) and failed.timestamp > 0
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "no" / "folder"))
    tell_mistake("train_rl: error: --lr x")
    said = capsys.readouterr().err.splitlines()
    assert said[:3] == ["train_rl: error: --lr x"] * 3 and "will not repeat it" in said[3]
