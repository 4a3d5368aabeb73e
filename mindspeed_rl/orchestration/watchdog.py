"""Notices that a rank failed, died or hangs, and ends all ranks with the cause (R30).

Two threads per rank; nothing here is collective, so it works while ranks are stuck in one.

- *heartbeat* talks to torchrun's store: it writes a sign of life, reads the published failure and
  watches one peer, rank + 1, so that every rank is watched by exactly one other.
- *guard* touches no network: it checks the phase against its deadline and the heartbeat thread
  against the store's silence, and receives SIGTERM and SIGINT, even while the main thread is
  inside C++.

The first failure stands and is told once per node; consequences of it end quietly.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from mindspeed_rl.bootstrap import World
from mindspeed_rl.orchestration.failures import (
    Beat,
    Failure,
    FailureBoard,
    Kind,
    Member,
    is_lost_connection,
    lost_failure,
    silent_ranks,
    whereabouts,
    write_error_file,
)


@dataclass(frozen=True, slots=True)
class Limits:
    """How patient a watchdog is, in seconds.

    Attributes:
        interval_s: between two heartbeats.
        silence_s: without a heartbeat a rank is taken for stopped or its machine for dead. Native
            code that keeps Python's lock for longer (a cold import) must fit in.
        patience_s: how long a rank that merely lost a connection looks for the true cause; several
            intervals.
        linger_s: how long the rank that tells a failure stays, so that others read it.
        exit_s: limit for the exit handlers of libraries.
    """

    interval_s: float = 1.0
    silence_s: float = 40.0
    patience_s: float = 3.5
    linger_s: float = 2.5
    exit_s: float = 60.0


class Watchdog:
    """The watcher of one rank. Create and start it in the main thread.

    Args:
        world: this process among its peers.
        phase_timeout_s: deadline of a phase, in seconds.
        prog: name of the entry, for messages.
        limits: patience.
    """

    def __init__(
        self, world: World, phase_timeout_s: float, prog: str, limits: Limits | None = None
    ) -> None:
        self._world = world
        self._timeout_s = phase_timeout_s
        self._prog = prog
        self._limits = limits or Limits()
        node = int(os.environ.get("GROUP_RANK", "0"))
        self._me = Member(world.rank, node, os.getpid())
        self._launcher = os.getppid()
        self._now = ("start", time.monotonic())  # phase and when it began; replaced as one
        self._leaving = threading.Event()
        self._ending = threading.Lock()
        self._contact = time.monotonic()
        self._signals, self._wakeup = socket.socketpair()
        self._board = FailureBoard(self._connect(), self._me, world.size)

    @staticmethod
    def _connect() -> PrefixStore:
        """A connection of our own: the default group's may be blocked in another thread."""
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        run = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=30))
        return PrefixStore(f"mindspeed_rl/{run}", store)

    def start(self) -> None:
        """Begin to watch."""
        faulthandler.enable()  # SIGABRT from a neighbour prints the stacks of a stuck process
        for end in (self._signals, self._wakeup):
            end.setblocking(False)
        # The C handler writes the number at once; a Python handler alone would wait for the main
        # thread to come out of native code.
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        for target in (self._heartbeat, self._guard):
            threading.Thread(target=target, name=target.__name__, daemon=True).start()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what this rank is doing; its deadline starts anew. Nested phases restore.

        After an exception the name stays: it is where the job ended.
        """
        before = self._now[0]
        self._now = (name, time.monotonic())
        yield
        self._now = (before, time.monotonic())

    def leave(self) -> None:
        """End together: nobody closes its connections while a peer still needs them.

        Collective: the world. From here on the end of a rank is no failure, and exit handlers have
        a time limit.
        """
        with self.phase("exit"):
            self._leaving.set()
            # before the barrier: after it the store may go away with the first node's launcher
            self._board.beat("exit", 0.0, leaving=True)
            dist.barrier()
        self._now = ("exit handlers", float("inf"))
        faulthandler.dump_traceback_later(self._limits.exit_s, exit=True)

    def fail(self, error: BaseException) -> NoReturn:
        """Publish why this rank ends, print it unless a peer did, and leave at once."""
        self._claim_end()
        kind: Kind = "usage" if isinstance(error, ValueError) else "error"
        text = str(error) if kind == "usage" else f"{type(error).__name__}: {error}"
        mine = self._failure(kind, text)
        if is_lost_connection(error):
            found = self._find_cause(range(self._world.size), "its peers lost their connection")
            if found is not None:
                self._follow(found)
        stands = self._tell(mine)
        if stands == mine and kind == "error":
            _print(f"{self._prog}: {_headline(mine)}")
            traceback.print_exception(error)
        elif stands != mine and stands.text != text:
            _print(f"{self._prog}: {_headline(mine)}")  # a failure of its own, after the first
        self._follow(stands, quiet=kind == "error")

    # -- the heartbeat thread ------------------------------------------------------------------

    def _heartbeat(self) -> None:
        peer = (self._world.rank + 1) % self._world.size
        last: tuple[int, float] = (0, 0.0)
        while not self._leaving.is_set():
            try:
                self._board.beat(*self._phase_age())
                told = self._board.told()
                beat = self._board.beat_of(peer)
            except dist.DistError as error:
                if not self._leaving.is_set():
                    self._end_alone(f"the launcher of the first node is gone ({_first(error)})")
                return
            now = self._contact = time.monotonic()
            if told is not None:
                self._end(told)
            if beat is not None and beat.count != last[0]:
                last = (beat.count, now)
            elif beat and not beat.leaving and now - last[1] > self._limits.silence_s:
                self._end(_silent(beat, now - last[1]))
            if os.getppid() != self._launcher:
                self._end(self._failure("lost", "the launcher of this node is gone"))
            self._leaving.wait(self._limits.interval_s)

    # -- the guard thread ----------------------------------------------------------------------

    def _guard(self) -> None:
        while True:
            if self._wait_for_signal(self._limits.interval_s / 2):
                self._end_on_signal()
            phase, seconds = self._phase_age()
            if seconds > self._timeout_s:
                self._end(self._late(phase, seconds))
            silence = time.monotonic() - self._contact
            if silence > self._limits.silence_s and not self._leaving.is_set():
                self._end_alone(f"torchrun's store has not answered for {silence:.0f} s")

    def _wait_for_signal(self, seconds: float) -> bool:
        return bool(select.select([self._signals], [], [], seconds)[0])

    def _end_on_signal(self) -> NoReturn:
        number = signal.Signals(self._signals.recv(1)[0])
        self._claim_end()
        stopped = self._failure("stopped", f"{number.name} from outside, e.g. the launcher")
        if number is signal.SIGINT:
            self._follow(self._tell(stopped))
        # torchrun ends the ranks of a node with SIGTERM when one of them is gone
        first = self._world.rank - self._world.local_rank
        neighbours = range(first, first + self._world.local_size)
        found = self._find_cause(neighbours, "torchrun ends its node")
        self._follow(found or self._tell(stopped))

    def _late(self, phase: str, seconds: float) -> Failure:
        text = f"exceeded --phase-timeout-s {self._timeout_s:g} ({seconds:.0f} s)"
        beats = _within(5.0, lambda: self._board.beats(range(self._world.size)))
        if beats:
            text += f". Where the ranks are: {whereabouts(beats.values())}"
        return self._failure("hang", text, phase)

    # -- the end -------------------------------------------------------------------------------

    def _phase_age(self) -> tuple[str, float]:
        phase, since = self._now
        return phase, time.monotonic() - since

    def _failure(self, kind: Kind, text: str, phase: str | None = None) -> Failure:
        me = self._me
        return Failure(kind, me.rank, me.node, me.pid, phase or self._now[0], text)

    def _find_cause(self, ranks: range, evidence: str) -> Failure | None:
        """The failure of which this rank sees only a consequence: published, or a silent peer."""
        deadline = time.monotonic() + self._limits.patience_s
        try:
            before = self._board.beats(ranks)
            while time.monotonic() < deadline:
                told = self._board.told()
                if told is not None:
                    return told
                time.sleep(self._limits.interval_s / 4)
            after: dict[int, Beat] = self._board.beats(ranks)
        except dist.DistError:  # the store went with the first node: there is no more to learn
            return None
        after.pop(self._me.rank, None)
        gone = silent_ranks(before, after)
        return self._tell(lost_failure(gone, evidence)) if gone else None

    def _tell(self, failure: Failure) -> Failure:
        """Publish; the failure that stands. Without an answer of the store it is this one."""
        return _within(5.0, lambda: self._board.tell(failure)) or failure

    def _claim_end(self) -> None:
        """Let one thread end this process; others stop here."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()

    def _end(self, failure: Failure) -> NoReturn:
        self._claim_end()
        self._follow(self._tell(failure))

    def _end_alone(self, text: str) -> NoReturn:
        """End when the store cannot be asked or told anything."""
        self._claim_end()
        self._follow(self._failure("lost", text), tell_here=self._world.local_rank == 0)

    def _follow(
        self, failure: Failure, *, quiet: bool = False, tell_here: bool | None = None
    ) -> NoReturn:
        """Report the failure that ends the job, and leave.

        Args:
            failure: the one that stands.
            quiet: this rank has printed it already.
            tell_here: whether this rank prints it; default: one rank per node.
        """
        blamed = failure.rank == self._me.rank
        line = f"{self._prog}: {_headline(failure)}"
        tells = self._tells(failure) if tell_here is None else tell_here
        if tells and not quiet:
            _print(line)
        if failure.kind in ("hang", "silent"):
            _print(f"stacks of rank {self._me.rank} in phase {self._now[0]}:")
            faulthandler.dump_traceback(all_threads=True)
        if failure.kind == "silent" and failure.node == self._me.node and not blamed:
            _abort(failure.pid)
        write_error_file(line)
        sys.stdout.flush()
        sys.stderr.flush()
        # The blamed rank leaves first, so that torchrun's report is about it.
        self._linger(self._limits.linger_s * (1 if blamed else 2))
        os._exit(failure.exit_code)

    def _tells(self, failure: Failure) -> bool:
        """One rank per node: the blamed one if it can, else the first that is not blamed."""
        if failure.node != self._me.node:
            return self._world.local_rank == 0
        if failure.kind in ("silent", "lost"):
            first = self._world.rank - self._world.local_rank
            return self._me.rank == (first + 1 if failure.rank == first else first)
        return failure.rank == self._me.rank

    def _linger(self, seconds: float) -> None:
        """Wait; a rank that only follows leaves earlier when its launcher asks."""
        while self._wait_for_signal(0):
            self._signals.recv(64)
        self._wait_for_signal(seconds)


def _headline(failure: Failure) -> str:
    return f"error: {failure.text}" if failure.kind == "usage" else f"the job ends: {failure}"


def _silent(beat: Beat, seconds: float) -> Failure:
    member = beat.member
    text = (
        f"no heartbeat for {seconds:.0f} s: process {member.pid} on node {member.node} is stopped, "
        "or stuck in native code, or its machine is gone"
    )
    return Failure("silent", member.rank, member.node, member.pid, beat.phase, text)


def _first(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _abort(pid: int) -> None:
    """Make a stuck neighbour print its stacks and die; torchrun would wait 30 s for it."""
    with suppress(ProcessLookupError):  # it is gone
        for number in (signal.SIGABRT, signal.SIGCONT):
            os.kill(pid, number)


def _within[T](seconds: float, ask: Callable[[], T]) -> T | None:
    """What the store answers, or ``None`` when it is gone or does not answer in time."""
    answers: list[T] = []

    def run() -> None:
        with suppress(dist.DistError):  # no answer
            answers.append(ask())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None
