"""What ranks tell each other about failures, when, and the sentences made of it."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from support.jobs import free_port
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from mindspeed_rl.core import stop_request
from mindspeed_rl.core.flights import Call, Position
from mindspeed_rl.core.ranks import rank_ranges
from mindspeed_rl.launch import attempt, watchdog
from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.launch.bound_store import MARK, LauncherStore
from mindspeed_rl.launch.failure_store import (
    FailureStore,
    answer_within,
    connect,
    publish_usage_error,
)
from mindspeed_rl.launch.failures import (
    JOIN,
    Failure,
    Heartbeat,
    Member,
    WatchdogSettings,
    is_lost_connection,
    lost_failure,
    report_usage_error,
    silent_ranks,
    whereabouts,
    write_error_file,
)
from mindspeed_rl.launch.watchdog import Heartbeats, PhaseClock
from mindspeed_rl.planning.phase_limits import PhaseLimits


def member(rank: int) -> Member:
    return Member(rank, node=rank // 2, pid=1000 + rank)


def beat(rank: int, count: int = 1, phase: str = "train", *, leaving: bool = False) -> Heartbeat:
    return Heartbeat(member(rank), count, phase, 2.0, leaving)


def failure(rank: int, text: str = "it broke") -> Failure:
    return Failure("error", member(rank), "train", text, member(rank))


@pytest.fixture
def stores() -> list[FailureStore]:
    store = dist.HashStore()
    return [FailureStore(store, member(rank)) for rank in range(3)]


def test_the_first_failure_stands_for_all(stores: list[FailureStore]) -> None:
    assert stores[0].published() is None
    assert stores[1].publish(failure(1)) == failure(1)
    assert stores[2].publish(failure(2, "a consequence")) == failure(1)
    assert [store.published() for store in stores] == [failure(1)] * 3


def test_heartbeats_of_ranks_that_never_started_do_not_block(
    stores: list[FailureStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "_current", [5])
    stores[0].beat("train", 1.5)
    stores[0].beat("reshard", 0.5, leaving=True)
    assert stores[1].beats(range(3)) == {0: Heartbeat(member(0), 2, "reshard", 0.5, True, 5)}


def test_silent_ranks_are_those_whose_count_stands_still() -> None:
    before = {0: beat(0), 1: beat(1), 2: beat(2)}
    after = {0: beat(0, 2), 1: beat(1), 2: beat(2, leaving=True), 3: beat(3)}
    assert silent_ranks(before, after) == [beat(1)]


def test_lost_ranks_are_named_with_process_node_and_phase() -> None:
    lost = lost_failure([beat(3, phase="generate"), beat(5)], "evidence", member(0))
    assert lost.failed == member(3) and lost.reporter == member(0) and lost.exit_code == 1
    for words in ("rank 3 in phase generate: process 1003 on node 1", "5 (train)", "evidence"):
        assert words in str(lost)


def test_whereabouts_start_with_the_odd_one_out() -> None:
    late = replace(beat(3, phase="generate"), phase_s=30.4)
    beats = [late, *(beat(rank, phase="exchange") for rank in (0, 1, 2, 5))]
    assert whereabouts(beats) == "generate for 30 s: rank 3; exchange for 2 s: rank 0-2, 5"
    assert rank_ranges([7, 9, 8, 1]) == "1, 7-9"


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[gloo/pair.cc:537] Read error [::1]:1: Connection reset by peer"), True),
        (RuntimeError("Connection closed by peer [127.0.0.1]:4"), True),
        (BrokenPipeError("x"), True),
        (dist.DistNetworkError("failed to recv, got 0 bytes"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("connection closed by peer"), False),
    ],
)
def test_lost_connections_are_told_from_failures(error: Exception, lost: bool) -> None:
    assert is_lost_connection(error) is lost


# -- when a rank beats, and what it sees in its peer -----------------------------------------------


class FakeClock:
    """A clock that moves when it is told to."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """The clock of the watchdog."""
    clock = FakeClock()
    monkeypatch.setattr(watchdog, "time", clock)
    return clock


STANDS = Position(
    {"7": 12},
    (Call("7", "world", (0, 1, 2), 12, "allreduce", "float32[4]", -1, "update.py:9", True, 3.5),),
)
LIMITS = WatchdogSettings(interval_s=1.0, silence_s=5.0, import_silence_s=90.0)


@pytest.fixture
def phases(clock: FakeClock) -> PhaseClock:
    return PhaseClock(PhaseLimits(600.0, {"generate": 900.0}))


@pytest.fixture
def heartbeats(stores: list[FailureStore], phases: PhaseClock) -> Heartbeats:
    """Those of the first of three ranks."""
    return Heartbeats(stores[0], World(0, 3, 0, 3), phases, LIMITS, lambda: STANDS)


def test_a_heartbeat_is_due_after_an_interval_or_in_another_phase(
    stores: list[FailureStore], clock: FakeClock, phases: PhaseClock, heartbeats: Heartbeats
) -> None:

    def told_at(now: float) -> tuple[int, str]:
        clock.now = now
        assert heartbeats.tick() is None
        beat = stores[1].beats([0])[0]
        return beat.count, beat.phase

    assert told_at(0.0) == told_at(0.9) == (1, "start")
    assert told_at(1.0) == (2, "start")
    with phases.phase("train"):
        assert told_at(1.2) == (3, "train")
        for _ in range(3):
            with phases.phase("log"):
                pass
        assert told_at(1.4) == (4, "train"), "brief phases between two ticks cost one heartbeat"
    assert told_at(1.6) == (5, "start") == told_at(2.5)


def test_a_published_failure_and_a_silent_peer_end_a_rank(
    stores: list[FailureStore], clock: FakeClock, heartbeats: Heartbeats
) -> None:
    stores[1].beat("generate", 2.0)
    for clock.now in (0.0, 5.0):
        assert heartbeats.tick() is None
    clock.now = 6.0
    silent = heartbeats.tick()
    assert silent is not None and silent.kind == "silent" and silent.with_stacks
    assert silent.failed == member(1) and silent.phase == "generate"
    stores[1].beat("generate", 9.0)
    clock.now = 7.0
    assert heartbeats.tick() is None
    stores[2].publish(failure(2))
    clock.now = 8.0
    assert heartbeats.tick() == failure(2)


def test_a_rank_that_is_asked_says_where_it_stands(
    stores: list[FailureStore], clock: FakeClock, heartbeats: Heartbeats
) -> None:
    """With its next heartbeat, once; what was not asked for costs no message."""
    assert heartbeats.tick() is None
    assert stores[1].positions(range(3)) == {}
    stores[2].ask()
    clock.now = 1.5
    assert heartbeats.tick() is None
    assert stores[1].positions(range(3)) == {0: STANDS}


@pytest.mark.parametrize("phase", ["start", JOIN, "build engine"])
def test_a_peer_may_be_silent_for_longer_while_it_imports(
    stores: list[FailureStore], clock: FakeClock, heartbeats: Heartbeats, phase: str
) -> None:
    """A library that comes from a cold file system to all ranks keeps Python's lock."""
    stores[1].beat(phase, 1.0)
    for clock.now in (0.0, 6.0, 90.0):
        assert heartbeats.tick() is None
    clock.now = 91.5
    silent = heartbeats.tick()
    assert silent is not None and silent.phase == phase


def test_a_peer_that_leaves_is_not_silent(
    stores: list[FailureStore], clock: FakeClock, heartbeats: Heartbeats
) -> None:
    stores[1].beat("exit", 0.0, leaving=True)
    for clock.now in (0.0, 50.0, 100.0):
        assert heartbeats.tick() is None


def test_a_phase_over_its_limit_names_its_flag(clock: FakeClock, phases: PhaseClock) -> None:
    with phases.phase(JOIN, 120.0):
        clock.now = 120.0
        assert not phases.overdue()
        clock.now = 121.0
        assert phases.overdue() == "exceeded --distributed-timeout-minutes 2 (121 s)"
    with phases.phase("train"):
        clock.now = 721.0
        assert not phases.overdue(), "the limit of all phases, from its begin"
        clock.now = 722.0
        assert phases.overdue() == "exceeded 600 s, see --phase-timeout-s (601 s)"
    with phases.phase("generate"):
        clock.now = 1622.0
        assert not phases.overdue(), "it has a limit of its own"
        clock.now = 1623.0
        assert phases.overdue() == "exceeded 900 s, see --phase-timeout-s (901 s)"
    assert phases.name == "start" and phases.seconds == 0.0


def test_steps_shorten_the_limits_of_the_next_ones(clock: FakeClock) -> None:
    """From the third step on; a phase that is not over samples keeps its limit."""
    names = ("generate", "train")
    limits = PhaseLimits(600.0, {"generate": 9000.0, "train": 8000.0}, frozenset(names))
    phases = PhaseClock(limits)

    def limit_of(name: str, seconds: float) -> float:
        with phases.phase(name):
            found = phases.current[2]
            clock.now += seconds
        return found

    for generate, train in ((50.0, 30.0), (70.0, 20.0)):
        assert (limit_of("generate", generate), limit_of("train", train)) == (9000.0, 8000.0)
    assert (limit_of("generate", 200.0), limit_of("train", 5.0)) == (700.0, 2000.0)
    assert limit_of("save", 0.0) == 600.0


# -- the store -------------------------------------------------------------------------------------


def test_a_store_that_never_answers_is_not_waited_for() -> None:
    """Its machine lost power; the calls of torch's stores have no limit of their own."""
    with pytest.raises(dist.DistError, match="no answer within"):
        answer_within(0.05, threading.Event().wait)
    assert answer_within(5.0, lambda: 7) == 7


@pytest.fixture
def store_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks meet under a launcher that holds no store of its own."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


@pytest.mark.usefixtures("store_address")
def test_ranks_meet_under_another_launcher_before_they_join() -> None:
    first = FailureStore(connect(0, 5.0), member(0))
    second = FailureStore(connect(1, 5.0), member(1))
    mistake = Failure("usage", member(1), "start", "no such file", member(1))
    second.publish(mistake)
    assert first.published() == mistake and mistake.exit_code == 2


@pytest.mark.usefixtures("store_address")
def test_a_rank_does_not_take_the_store_of_another_launcher_for_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node that came back early met the launcher that was ending, and its ranks meet the next."""
    monkeypatch.setenv(MARK, "of a start that is over")
    first = LauncherStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 1, True)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    connect(1, 5.0)
    os.environ[MARK] = "of the launcher before"
    with pytest.raises(RuntimeError, match="was started again since this node met it"):
        connect(1, 5.0)
    del first


@pytest.mark.usefixtures("store_address")
def test_a_node_that_comes_back_learns_of_the_attempt_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own starter knows of no restart; so does that of a node which others have waited for."""
    monkeypatch.setenv("GROUP_RANK", "0")
    monkeypatch.setenv(attempt.RESTARTS, "0")
    monkeypatch.setenv(attempt.BEGAN, "5000.0")
    patient = WatchdogSettings(poll_interval_s=0.01)
    dog = watchdog.Watchdog(World(0, 6, 0, 2), PhaseLimits(600.0), "entry", patient)
    for rank, known in ((2, attempt.Attempt(3, 1000.5)), (4, attempt.Attempt(1, 4000.0))):
        FailureStore(connect(rank, 5.0), member(rank)).tell_attempt(known)
    newest = dog.newest_attempt(3)
    assert newest == attempt.Attempt(3, 1000.5)
    newest.join()
    assert attempt.Attempt.of_node() == newest
    assert attempt.restart_metrics()["run/restarts"] == 3.0


@pytest.mark.usefixtures("store_address")
def test_a_phase_is_published_when_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is killed in a short phase is reported in that one, not in the one before."""
    beats: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(Heartbeats, "tick", lambda self, **_: beats.put(self._phases.name))
    patient = WatchdogSettings(poll_interval_s=600.0)
    dog = watchdog.Watchdog(World(0, 1, 0, 1), PhaseLimits(600.0), "entry", patient)
    dog._threads[0].start()
    with dog.phase("train"):
        assert beats.get(timeout=30.0) == "train"
        with dog.phase("log"):
            assert beats.get(timeout=30.0) == "log"
    dog._left.set()
    dog._phases.changed.set()
    dog._threads[0].join(30.0)


@pytest.mark.parametrize("cause", [False, True])
@pytest.mark.usefixtures("store_address")
def test_sigterm_asks_for_a_save_unless_a_neighbour_is_gone(
    monkeypatch: pytest.MonkeyPatch, cause: bool
) -> None:
    """torchrun sends the same signal to the ranks that survive another one."""
    ended: list[object] = []
    settings = WatchdogSettings(saves_at_sigterm=True, cause_timeout_s=0.3)
    dog = watchdog.Watchdog(World(0, 2, 0, 2), PhaseLimits(600.0), "entry", settings)
    monkeypatch.setattr(dog, "_end", ended.append)
    monkeypatch.setattr(dog, "_exit", lambda *_: pytest.fail("it must not leave"))
    dog._store.beat("train", 0.0)
    neighbour = FailureStore(connect(1, 5.0), member(1))
    neighbour.beat("train", 0.0)
    alive = threading.Event()

    def beats() -> None:
        while not alive.wait(0.02):
            neighbour.beat("train", 0.0)

    thread = threading.Thread(target=beats)
    if not cause:
        thread.start()
    stop_request.withdraw()
    try:
        dog._end_on_signal(signal.SIGTERM)
        assert stop_request.is_asked() is not cause and bool(ended) is cause
        dog._end_on_signal(signal.SIGTERM)  # a queue and a launcher may both send it
    finally:
        stop_request.withdraw()
        alive.set()
        if not cause:
            thread.join()


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("where", ["last files", "exit", "train"])
@pytest.mark.usefixtures("store_address")
def test_sigterm_does_not_end_a_job_that_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str, saves: bool
) -> None:
    """Rank 0 writes its last files, for which the others wait; there is no step to save."""
    ended: list[Failure] = []
    settings = WatchdogSettings(cause_timeout_s=0.3, saves_at_sigterm=saves)
    dog = watchdog.Watchdog(World(0, 1, 0, 1), PhaseLimits(600.0), "entry", settings)
    monkeypatch.setattr(dog, "_follow", ended.append)
    dog._store.beat(where, 0.0)
    dog._leaving = where == "exit"
    stop_request.withdraw()
    with dog.phase(where):
        dog._end_on_signal(signal.SIGTERM)
    assert stop_request.is_asked() is (saves and where == "train")
    stop_request.withdraw()
    stopped = where == "train" and not saves
    assert [(f.kind, f.phase) for f in ended] == [("stopped", "train")] * stopped
    said = capsys.readouterr().err
    assert ("writes its last files" in said) is (where == "last files")
    assert ("saves after this step" in said) is (saves and where == "train")


@pytest.mark.usefixtures("store_address")
def test_a_launcher_that_is_gone_is_said_so() -> None:
    with pytest.raises(RuntimeError, match="launcher of the first node"):
        connect(1, 1.0)
    publish_usage_error(
        World(1, 2, 0, 1), "a mistake", WatchdogSettings(connect_s=1.0)
    )  # and nobody waits


# A rank whose heartbeat comes too late: a lost connection is the first that it sees.
LATE_RANK = """
import os
import sys

from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.launch.failures import WatchdogSettings
from mindspeed_rl.launch.watchdog import Watchdog
from mindspeed_rl.planning.phase_limits import PhaseLimits

limits = WatchdogSettings(cause_timeout_s=0.2, exit_grace_s=0.1)
watchdog = Watchdog(World(0, 2, 0, 2), PhaseLimits(600.0), "entry", limits)
print("ready", flush=True)
os.read(int(sys.argv[1]), 1)  # until the test closes its end, or ends
watchdog.fail(RuntimeError("Connection closed by peer [127.0.0.1]:1"))
"""


@pytest.mark.parametrize("gone", ["this node", "the first node", "nobody"])
def test_neighbours_lost_with_a_launcher_are_not_the_cause(
    store_address: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gone: str
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, is_master=True, wait_for_workers=False)
    go, our_end = os.pipe()
    launcher = subprocess.Popen(
        ["sh", "-c", '"$0" -c "$1" "$2" & wait', sys.executable, LATE_RANK, str(go)],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, pass_fds=(go,),
    )  # fmt: skip
    os.close(go)
    assert launcher.stdout is not None and launcher.stdout.readline() == "ready\n"
    if gone == "this node":
        launcher.kill()
        launcher.wait()
    elif gone == "the first node":
        del store
    os.close(our_end)
    assert launcher.stderr is not None
    said = launcher.stderr.read()  # until the rank ends
    launcher.wait()
    causes = [line for line in said.splitlines() if line.startswith("entry: the job ends: ")]
    cause = "RuntimeError: Connection" if gone == "nobody" else f"the launcher of {gone} is gone"
    assert len(causes) == 1 and cause in causes[0], said


# -- torchrun's report -----------------------------------------------------------------------------


def test_torchruns_report_repeats_the_first_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As torchrun reads what a failed process left; without a launcher it is only printed."""
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    report_usage_error("train_rl: error: --lr x")
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    report_usage_error("train_rl: error: --lr x")
    write_error_file("a consequence")
    assert json.loads(file.read_text())["message"]["message"] == "train_rl: error: --lr x"
    failed = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))
    report = ChildFailedError("train_rl", {0: failed})
    assert "traceback : train_rl: error: --lr x" in str(report) and failed.timestamp > 0
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "no" / "folder"))
    report_usage_error("train_rl: error: --lr x")
    said = capsys.readouterr().err.splitlines()
    assert said[:3] == ["train_rl: error: --lr x"] * 3 and "will not repeat it" in said[3]
