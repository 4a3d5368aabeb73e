"""Nodes that agree on who goes on, and what each of them then starts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_tiny_model import write_tiny_model

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.elastic import meeting
from mindspeed_rl.elastic import node as elastic
from mindspeed_rl.elastic.commands import NodeCommand, in_round, layout_problem, without
from mindspeed_rl.elastic.meeting import (
    AttemptRound,
    JobEnd,
    JobSize,
    Meeting,
    NodeNote,
    Seen,
    chosen_round,
    may_start,
    read_round,
    waiting_for,
    write_round,
)
from mindspeed_rl.launch import attempt

WAIT_S = 0.3


class Clock:
    """Time that passes by one beat when every living node has beaten.

    All nodes of a test are threads of one process on a machine that may be busy. A thread that is
    not run for a while, or waits for the disk, then stops the time of all instead of being lost.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._beats: dict[Meeting, int] = {}
        self._silent: dict[Meeting, float] = {}
        self._now = 0.0

    def add(self, starter: Meeting) -> Meeting:
        with self._lock:
            self._beats[starter] = 0
        return starter

    def monotonic(self) -> float:
        with self._lock:
            living = [s for s in self._beats if not s._closed.is_set()]
            heard = [s for s in living if self._silent.get(s, 0.0) <= self._now]
            if all(starter._mine.beat > self._beats[starter] for starter in heard):
                self._beats = {starter: starter._mine.beat for starter in living}
                self._now += meeting.BEAT_S
            return self._now

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        until = self.monotonic() + seconds
        while self.monotonic() < until:
            time.sleep(meeting.BEAT_S / 2)

    def silence(self, starter: Meeting, seconds: float) -> None:
        """Let a node write nothing for some time, as on a disk that stands still."""
        until, write = self.monotonic() + seconds, starter._write

        def late() -> None:
            while self.monotonic() < until:
                time.sleep(meeting.BEAT_S / 2)
            write()

        self._silent[starter] = until
        starter._write = late  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    running = SimpleNamespace(monotonic=clock.monotonic, sleep=time.sleep, time=time.time)
    monkeypatch.setattr(meeting, "time", running)
    for name, value in (("BEAT_S", 0.02), ("HERE_S", 0.5), ("GONE_S", 0.8), ("JOIN_LIMIT_S", 3.0)):
        monkeypatch.setattr(meeting, name, value)
    return clock


class Nodes:
    """The starters of a job's nodes, in threads of this process."""

    def __init__(self, folder: Path, pool: ThreadPoolExecutor, clock: Clock, size: JobSize) -> None:
        self.folder, self.pool, self.clock, self.size = folder, pool, clock, size
        self.said: list[str] = []
        self.over = threading.Event()
        self.problems: dict[int, str] = {}

    def starter(self, node: int) -> Meeting:
        address = f"10.0.0.{node}"
        return self.clock.add(Meeting(self.folder, self.size, node, address, self.said.append))

    def join(self, starter: Meeting, restarts: int) -> Future[AttemptRound | JobEnd | None]:
        problem_of: Callable[[int], str] = lambda count: self.problems.get(count, "")  # noqa: E731
        return self.pool.submit(starter.join, restarts, problem_of, self.over.is_set)

    def first(self) -> list[Meeting]:
        """All nodes in their first attempt."""
        starters = [self.starter(node) for node in range(self.size.nodes)]
        rounds = [found.result(90) for found in [self.join(s, 0) for s in starters]]
        assert all(found == rounds[0] for found in rounds)
        assert isinstance(rounds[0], AttemptRound)
        assert rounds[0].nodes == tuple(range(self.size.nodes)) and rounds[0].restarts == 0
        return starters


def kill(starter: Meeting) -> None:
    """What kill -9 of the process leaves: its last note."""
    starter._closed.set()
    starter._pulse.join()


@pytest.fixture
def make(tmp_path: Path, clock: Clock) -> Iterator[Callable[[int, int], Nodes]]:
    made: list[Nodes] = []
    with ThreadPoolExecutor(8) as pool:

        def nodes(count: int, fewest: int) -> Nodes:
            size = JobSize(count, fewest, WAIT_S)
            made.append(Nodes(tmp_path / "nodes", pool, clock, size))
            return made[-1]

        yield nodes
        for one in made:
            one.over.set()


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_the_nodes_that_are_left_agree_on_an_attempt(
    make: Callable[[int, int], Nodes], lost: int
) -> None:
    """The first node may be lost; the next one then holds the store."""
    nodes = make(3, 1)
    starters = nodes.first()
    kill(starters[lost])
    left = [node for node in range(3) if node != lost]
    waiting = [nodes.join(starters[node], 1) for node in left]
    rounds = [found.result(90) for found in waiting]
    assert rounds[0] == rounds[1] and isinstance(rounds[0], AttemptRound)
    assert rounds[0].nodes == tuple(left) and rounds[0].restarts == 1
    assert rounds[0].addresses == tuple(f"10.0.0.{node}" for node in left)


def test_a_living_node_is_waited_for_however_long_its_ranks_take_to_end(
    make: Callable[[int, int], Nodes],
) -> None:
    nodes = make(2, 1)
    first, second = nodes.first()
    waiting = nodes.join(first, 1)
    nodes.clock.wait(5 * WAIT_S)
    assert not waiting.done()
    other = nodes.join(second, 1).result(90)
    assert waiting.result(90) == other and isinstance(other, AttemptRound) and other.nodes == (0, 1)


def test_a_node_that_comes_back_joins_the_next_attempt(make: Callable[[int, int], Nodes]) -> None:
    nodes = make(2, 1)
    first, second = nodes.first()
    kill(first)
    alone = nodes.join(second, 1).result(90)
    assert isinstance(alone, AttemptRound) and alone.nodes == (1,)
    back = nodes.starter(0)
    waiting = nodes.join(back, 0)
    nodes.clock.wait(5 * WAIT_S)
    assert not waiting.done(), "the job goes on meanwhile"
    again = nodes.join(second, 2)
    assert waiting.result(90) == again.result(90)
    found = again.result()
    assert isinstance(found, AttemptRound) and found.nodes == (0, 1) and found.restarts == 2


def test_a_job_has_as_many_nodes_as_its_layout_allows(make: Callable[[int, int], Nodes]) -> None:
    """The third one waits, and is told when the job has ended."""
    nodes = make(4, 1)
    starters = nodes.first()
    nodes.problems[3] = "3 does not divide 8"
    kill(starters[1])
    waiting = {node: nodes.join(starters[node], 1) for node in (0, 2, 3)}
    for node in (0, 2):
        found = waiting[node].result(90)
        assert isinstance(found, AttemptRound) and found.nodes == (0, 2)
    while not any("goes on without this node" in line for line in nodes.said):
        time.sleep(meeting.BEAT_S)
    nodes.clock.wait(3 * WAIT_S)
    assert not waiting[3].done()
    starters[0].leave(0, "it is done")
    assert waiting[3].result(90) == JobEnd(0, "node 0 ended the job: it is done")


def test_all_nodes_end_where_the_layout_allows_no_number_of_them(
    make: Callable[[int, int], Nodes],
) -> None:
    nodes = make(3, 2)
    starters = nodes.first()
    nodes.problems[2] = "with 2 nodes (4 ranks) it cannot run: tp * pp = 6"
    kill(starters[2])
    ends = [found.result(90) for found in [nodes.join(s, 1) for s in starters[:2]]]
    assert ends == [JobEnd(1, nodes.problems[2])] * 2


def test_too_few_nodes_wait_for_one_that_comes_back_and_then_end(
    make: Callable[[int, int], Nodes],
) -> None:
    nodes = make(2, 2)
    first, second = nodes.first()
    kill(second)
    end = nodes.join(first, 1).result(90)
    assert isinstance(end, JobEnd) and "1 of at least 2 nodes" in end.text
    assert "node 1 is missing" in end.text and str(nodes.folder) in end.text


def test_a_node_that_gives_up_ends_the_others(make: Callable[[int, int], Nodes]) -> None:
    nodes = make(2, 1)
    first, second = nodes.first()
    first.leave(7, "the same fault came 2 times")
    end = nodes.join(second, 1).result(90)
    assert end == JobEnd(7, "node 0 ended the job: the same fault came 2 times")


def test_a_job_that_is_started_anew_does_not_take_old_notes_for_its_own(
    make: Callable[[int, int], Nodes],
) -> None:
    """Neither those of a job that ended, nor those of one that was killed."""
    nodes = make(2, 1)
    for starter in nodes.first():
        starter.leave(1, "it broke")
    for starter in nodes.first():
        kill(starter)
    again = [nodes.starter(node) for node in (1, 0)]
    late = nodes.join(again[0], 0)
    nodes.clock.wait(5 * WAIT_S)
    assert not late.done(), "a first start waits for all nodes"
    both = [nodes.join(again[1], 0).result(90), late.result(90)]
    assert both[0] == both[1] and isinstance(both[0], AttemptRound) and both[0].nodes == (0, 1)


def test_a_folder_that_cannot_be_written_for_a_while_is_told_once(
    make: Callable[[int, int], Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = make(1, 1)
    (starter,) = nodes.first()

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "write_text", full)
        waiting = nodes.join(starter, 1)
        time.sleep(WAIT_S)
    assert isinstance(waiting.result(90), AttemptRound)
    assert [line for line in nodes.said if "No space left" in line] == nodes.said


def test_a_node_that_is_silent_when_the_others_decide_is_not_left_out(
    make: Callable[[int, int], Nodes],
) -> None:
    nodes = make(3, 1)
    starters = nodes.first()
    kill(starters[1])
    first, second = [nodes.join(starters[node], 1) for node in (0, 2)]
    nodes.clock.wait(0.5)
    nodes.clock.silence(starters[2], 0.7)  # they decide 0.6 s later
    found = first.result(90)
    assert isinstance(found, AttemptRound) and found.nodes == (0, 2)
    assert second.result(90) == found


@pytest.mark.parametrize(
    ("age_s", "changed", "is_here", "is_known"),
    [
        (0.0, True, True, True), (0.6, True, False, False), (0.9, True, False, True),
        (0.0, False, False, False), (0.9, False, False, True),
    ],
)  # fmt: skip
def test_it_is_known_of_a_node_that_it_waits_or_that_it_is_lost(
    age_s: float, changed: bool, is_here: bool, is_known: bool
) -> None:
    surely = Seen(note(1), 0.1, True)
    found = waiting_for(3, [surely, Seen(note(2), age_s, changed)])
    assert found == ([note(1), note(2)][: 1 + is_here], is_known)
    assert waiting_for(4, [surely, Seen(note(2), age_s, changed)]) == ([], True)


def note(number: int, restarts: int = 0, began: float = 5.0) -> NodeNote:
    return NodeNote(number, f"s{number}", f"h{number}", 3, meeting.WAITS, restarts, began)


@given(
    st.sets(st.integers(0, 7), min_size=1),
    st.sets(st.integers(1, 8)),
    st.integers(1, 8),
)
def test_the_largest_number_of_nodes_that_is_allowed_is_chosen(
    present: set[int], allowed: set[int], fewest: int
) -> None:
    notes = [note(node, restarts=node, began=9.0 - node) for node in present]
    size = JobSize(8, fewest, WAIT_S)
    found = chosen_round(
        size, notes, lambda count: "" if count in allowed else f"not {count}", Path("save")
    )
    fitting = [count for count in allowed if fewest <= count <= len(present)]
    assert len(found.nodes) == max(fitting, default=0)
    assert found.nodes == tuple(sorted(present))[: len(found.nodes)]
    assert found.starters == tuple(f"s{node}" for node in found.nodes)
    assert found.restarts == max(present) and found.began == 9.0 - max(present)
    assert bool(found.refusal) == (not fitting)
    if not fitting and len(present) >= fewest:
        assert found.refusal == f"not {len(present)}", "the largest number is the one to explain"


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 6), st.floats(0, 10), st.booleans())
def test_a_start_waits_for_all_and_a_restart_for_the_fewest(
    nodes: int, fewest: int, count: int, waited_s: float, again: bool
) -> None:
    present = [note(node, restarts=int(again)) for node in range(count)]
    found = may_start(JobSize(nodes, fewest, 2.0), present, waited_s)
    late = waited_s >= meeting.JOIN_LIMIT_S
    enough = again and count >= max(1, fewest) and waited_s >= 2.0
    assert found == (count >= nodes or late or enough)


def test_a_round_is_decided_once(tmp_path: Path) -> None:
    rounds = [AttemptRound((n,), (str(n),), ("h",), n, 1.5) for n in range(16)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda one: write_round(tmp_path, 4, one), rounds))
    assert read_round(tmp_path, 4) in rounds and meeting.newest_round(tmp_path) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["round-4.json"]
    (tmp_path / "round-5.json").write_text('{"nodes": 3}')
    with pytest.raises(ValueError, match=r"round-5\.json"):
        read_round(tmp_path, 5)


def test_a_disk_that_fills_while_a_round_is_written_keeps_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starters decide again every second until there is room."""

    def fills(path: Path, text: str) -> None:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fills)
    with pytest.raises(OSError, match="No space left"):
        write_round(tmp_path, 4, AttemptRound((0,), ("s",), ("h",), 0, 1.5))
    assert not list(tmp_path.iterdir())


COMMAND = (
    "python -m mindspeed_rl.launch.bound_store --nproc-per-node 8 --nnodes 3 --node-rank 2 "
    "--master-addr h0 --master-port 29500 -m mindspeed_rl.train_rl --rl-world-size 24 --save s -m x"
)


def test_a_node_starts_with_the_numbers_of_the_attempt() -> None:
    command = NodeCommand.parse(COMMAND.split())
    assert " ".join(command.line()) == COMMAND
    smaller = in_round(command, AttemptRound((1, 2), ("a", "b"), ("h1", "h2"), 1, 0.0))
    assert " ".join(smaller.line()) == COMMAND.replace("--nnodes 3 --node-rank 2", (
        "--nnodes 2 --node-rank 1"
    )).replace("h0", "h1").replace("24", "16")  # fmt: skip
    assert without(["--a", "1", "--rl_dry_run_json=x", "--b", "--c"], ["--rl-dry-run-json"]) == [
        "--a", "1", "--b", "--c",
    ]  # fmt: skip


def test_metrics_tell_restarts_and_nodes() -> None:
    assert attempt.restart_metrics({"GROUP_WORLD_SIZE": "3"}) == {}
    found = attempt.restart_metrics({attempt.RESTARTS: "2", "GROUP_WORLD_SIZE": "3"})
    assert found == {"run/restarts": 2.0, "run/nodes": 3.0}


def arguments(tmp_path: Path, *more: str) -> list[str]:
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    return [
        "--hf-checkpoint", str(write_tiny_model(tmp_path / "model")), "--platform", "cpu",
        "--prompt-data", str(tmp_path / "data.jsonl"), "--reward-function", "format",
        "--make-vocab-size-divisible-by", "8", "--train-iters", "2",
        "--max-prompt-length", "16", "--rollout-max-response-length", "8",
        "--save", str(tmp_path / "save"), *more,
    ]  # fmt: skip


def test_a_layout_that_the_fewest_nodes_cannot_have_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the rules of the dry run, which knows what divides what."""
    own = arguments(tmp_path, "--tensor-model-parallel-size", "2")
    line = [*COMMAND.split()[:15], *own]
    line[line.index("--nproc-per-node") + 1] = "1"
    command = NodeCommand.parse(line)
    assert layout_problem(command.module, own, 2) == ""
    with pytest.raises(UsageError, match=r"--elastic-min-nodes 1: with 1 node \(1 rank\).*2"):
        elastic.ElasticNode(command, 1, 1.0, print)
    with pytest.raises(UsageError, match="from 1 to the number of nodes, 3"):
        elastic.ElasticNode(command, 4, 1.0, print)
    with pytest.raises(UsageError, match="needs --save"):
        elastic.ElasticNode(
            NodeCommand.parse(COMMAND.replace("--save s", "").split()), 3, 1.0, print
        )
    monkeypatch.setenv(elastic.NODE_ADDR, "10.1.2.3")
    assert elastic.own_address(command) == "10.1.2.3"
    monkeypatch.delenv(elastic.NODE_ADDR)
    local = NodeCommand.parse(COMMAND.replace("h0", "127.0.0.1").split())
    assert elastic.own_address(local) == "127.0.0.1", "the route to the first node starts here"
