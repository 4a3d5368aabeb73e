"""Notices that a rank failed, died or hangs, and ends all ranks with the cause.

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
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from mindspeed_rl.bootstrap import World
from mindspeed_rl.orchestration.failures import (
    Failure,
    FailureBoard,
    Kind,
    is_lost_connection,
    is_usage_error,
    lost_failure,
    silent_failure,
    silent_ranks,
    whereabouts,
    write_error_file,
)
from mindspeed_rl.orchestration.launcher_report import tell_mistake
from mindspeed_rl.orchestration.launcher_store import connect, this_member
from mindspeed_rl.orchestration.limits import JOIN, Limits

T = TypeVar("T")
# What the guard receives, and what handles it before and after.
_HANDLED: dict[int, Any] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}
_NO_LAUNCHER = "the launcher of this node is gone"
_ANSWER_S = 5.0  # for the store to answer a rank that ends


class Watchdog:
    """The watcher of one rank. Create and start it in the main thread.

    Args:
        world: this process among its peers.
        phase_timeout_s: deadline of a phase, in seconds.
        prog: name of the entry, for messages.
        limits: patience.
        driver_tells: the driver of the ranks prints what they publish, so they do not.
    """

    def __init__(
        self,
        world: World,
        phase_timeout_s: float,
        prog: str,
        limits: Limits | None = None,
        *,
        driver_tells: bool = False,
    ) -> None:
        self._world = world
        self._driver_tells = driver_tells
        self._timeout_s = phase_timeout_s
        self._prog = prog
        self._limits = limits or Limits()
        self._me = this_member(world)
        self._launcher = os.getppid()
        # phase, when it began, its limit in seconds; replaced as one
        self._now = ("start", time.monotonic(), phase_timeout_s)
        self._leaving = False  # this rank waits for the others to end
        self._left = threading.Event()
        self._asked = threading.Event()  # the launcher asked this rank to end
        self._ending = threading.Lock()
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for name, target in (("heartbeat", self._heartbeat), ("guard", self._guard))
        ]
        self._contact = time.monotonic()
        self._signals, self._wakeup = socket.socketpair()
        self._board = FailureBoard(
            connect(world.rank, self._limits.connect_s), self._me, world.size
        )

    def start(self) -> None:
        """Begin to watch."""
        self._board.beat(*self._phase_age())
        faulthandler.enable()  # SIGABRT from a neighbour prints the stacks of a stuck process
        for end in (self._signals, self._wakeup):
            end.setblocking(False)
        # The C handler writes the number at once; a Python handler alone would wait for the main
        # thread to come out of native code.
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        for number in _HANDLED:
            signal.signal(number, lambda *_: None)
        for thread in self._threads:
            thread.start()

    @contextmanager
    def phase(self, name: str, timeout_s: float | None = None) -> Iterator[None]:
        """Name what this rank is doing; its deadline starts anew. Nested phases restore.

        After an exception the name stays: it is where the job ended.

        Args:
            name: of the phase.
            timeout_s: its limit, if not that of all phases.
        """
        before, _, limit_s = self._now
        self._enter(name, self._timeout_s if timeout_s is None else timeout_s)
        yield
        self._enter(before, limit_s)

    def _enter(self, name: str, limit_s: float) -> None:
        self._now = (name, time.monotonic(), limit_s)

    def leave(self) -> None:
        """End together: nobody closes its connections while a peer still needs them.

        Collective: the world. From here on the end of a rank is no failure, and exit handlers have
        a time limit.
        """
        with self.phase("exit"):
            self._leaving = True
            # before the barrier: after it the store may go away with the first node's launcher
            self._board.beat("exit", 0.0, leaving=True)
            dist.barrier()
        faulthandler.dump_traceback_later(self._limits.exit_s, exit=True)
        self._left.set()
        # A thread that the interpreter's end finds inside the store's C++ aborts the process.
        for thread in self._threads:
            thread.join()
        signal.set_wakeup_fd(-1)
        for number, handler in _HANDLED.items():
            signal.signal(number, handler)

    def fail(self, error: BaseException) -> NoReturn:
        """Publish why this rank ends, print it unless a peer did, and leave at once."""
        self._claim_end()
        usage = is_usage_error(error)
        text = str(error) if usage else f"{type(error).__name__}: {error}"
        mine = self._failure("usage" if usage else "error", text)
        if self._driver_tells and not usage:
            mine = replace(mine, trace="".join(traceback.format_exception(error)))
        stands: Failure | None = None
        if is_lost_connection(error):
            self._leave_if_orphaned()
            stands = self._find_cause(range(self._world.size), "its peers lost their connection")
            if stands is None:
                self._leave_if_orphaned()
        stands = stands or self._tell(mine)
        if stands == mine and not usage:
            if not self._driver_tells:
                traceback.print_exception(error)
        elif stands.text != text and not is_lost_connection(error):
            self._print(mine)  # a failure of its own, after the first
        self._follow(stands)

    # -- the heartbeat thread ------------------------------------------------------------------

    def _heartbeat(self) -> None:
        peer = (self._world.rank + 1) % self._world.size
        last: tuple[int, float] = (0, 0.0)
        while not self._left.is_set():
            seen = self._now
            try:
                self._board.beat(*self._phase_age(), leaving=self._leaving)
                told = self._board.told()
                beat = self._board.beat_of(peer)
            except dist.DistError as error:
                if self._leaving:  # the first node was faster
                    return
                self._end_alone(_no_store(error))
            now = self._contact = time.monotonic()
            if told is not None:
                self._end(told)
            if beat is not None and beat.count != last[0]:
                last = (beat.count, now)
            elif beat and not beat.leaving and now - last[1] > self._limits.silence_s:
                self._end(silent_failure(beat, now - last[1], self._me))
            if os.getppid() != self._launcher:
                self._end_alone(_NO_LAUNCHER)
            self._rest(seen)

    def _rest(self, seen: tuple[str, float, float]) -> None:
        """Until the next heartbeat, or another phase than ``seen``, which is looked for seldom."""
        end = time.monotonic() + self._limits.interval_s
        while not self._left.wait(self._limits.look_s):
            if self._now is not seen or time.monotonic() >= end:
                return

    # -- the guard thread ----------------------------------------------------------------------

    def _guard(self) -> None:
        while not self._left.is_set():
            if select.select([self._signals], [], [], self._limits.interval_s / 2)[0]:
                self._end_on_signal(self._signals.recv(1)[0])
            phase, since, limit_s = self._now
            seconds = time.monotonic() - since
            if seconds > limit_s:
                self._end(self._late(phase, seconds, limit_s))
            silence = time.monotonic() - self._contact
            if silence > self._limits.silence_s and not self._leaving:
                self._end_alone(f"torchrun's store has not answered for {silence:.0f} s")

    def _end_on_signal(self, number: int) -> None:
        if number not in _HANDLED:  # of a handler that a library installed
            return
        self._asked.set()
        self._claim_end()
        name = signal.Signals(number).name
        stopped = self._failure("stopped", f"{name} from the launcher or its user")
        if number == signal.SIGINT:
            self._follow(self._tell(stopped))
        # torchrun ends the ranks of a node with SIGTERM when one of them is gone
        first = self._world.rank - self._world.local_rank
        neighbours = range(first, first + self._world.local_size)
        found = self._find_cause(neighbours, "torchrun ends its node")
        self._follow(found or self._tell(stopped))

    def _late(self, phase: str, seconds: float, limit_s: float) -> Failure:
        flag = "--distributed-timeout-minutes" if phase == JOIN else "--phase-timeout-s"
        limit = f"{limit_s / 60:g}" if phase == JOIN else f"{limit_s:g}"
        text = f"exceeded {flag} {limit} ({seconds:.0f} s)"
        with suppress(dist.DistError):  # the store does not answer
            beats = _within(_ANSWER_S, lambda: self._board.beats(range(self._world.size)))
            text += f". Where the ranks are: {whereabouts(beats.values())}"
        return self._failure("hang", text, phase)

    # -- the end -------------------------------------------------------------------------------

    def _phase_age(self) -> tuple[str, float]:
        phase, since, _ = self._now
        return phase, time.monotonic() - since

    def _failure(self, kind: Kind, text: str, phase: str | None = None) -> Failure:
        return Failure(kind, self._me, phase or self._now[0], text, self._me)

    def _find_cause(self, ranks: range, evidence: str) -> Failure | None:
        """The failure of which this rank sees only a consequence: published, or a silent peer."""
        deadline = time.monotonic() + self._limits.patience_s
        try:
            before = _within(_ANSWER_S, lambda: self._board.beats(ranks))
            while time.monotonic() < deadline:
                told = _within(_ANSWER_S, self._board.told)
                if told is not None:
                    return told
                time.sleep(self._limits.interval_s / 4)
            after = _within(_ANSWER_S, lambda: self._board.beats(ranks))
        except dist.DistError:  # the store went with the first node: there is no more to learn
            return None
        after.pop(self._me.rank, None)
        gone = silent_ranks(before, after)
        return self._tell(lost_failure(gone, evidence, self._me)) if gone else None

    def _tell(self, failure: Failure) -> Failure:
        """Publish; the failure that stands. Without an answer of the store it is this one."""
        try:
            return _within(_ANSWER_S, lambda: self._board.tell(failure))
        except dist.DistError:
            return failure

    def _claim_end(self) -> None:
        """Let one thread end this process; others stop here."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()

    def _end(self, failure: Failure) -> NoReturn:
        self._claim_end()
        self._follow(self._tell(failure))

    def _end_alone(self, text: str) -> NoReturn:
        """End when nobody can be asked or told; the first rank of the node prints it."""
        self._claim_end()
        self._leave_alone(text)

    def _leave_if_orphaned(self) -> None:
        """A launcher that is gone takes neighbours along, whose lost connections are no cause."""
        if os.getppid() != self._launcher:
            self._leave_alone(_NO_LAUNCHER)
        try:
            _within(_ANSWER_S, self._board.told)
        except dist.DistError as error:
            self._leave_alone(_no_store(error))

    def _leave_alone(self, text: str) -> NoReturn:
        failure = self._failure("lost", text)
        if self._world.local_rank == 0:
            self._print(failure)
        self._exit(failure, 0.0)

    def _follow(self, failure: Failure) -> NoReturn:
        """Report the failure that ends the job, once per node, and leave."""
        teller, here = failure.teller, self._me
        if teller == here or (teller.node != here.node and self._world.local_rank == 0):
            self._print(failure)
        if failure.with_stacks:
            print(f"stacks of rank {here.rank}:", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(all_threads=True)
        blamed = failure.blamed
        if failure.kind == "silent" and blamed.node == here.node and blamed != here:
            _abort(blamed.pid)
        self._exit(failure, self._limits.linger_s)

    def _exit(self, failure: Failure, linger_s: float) -> NoReturn:
        """Leave without exit handlers, which may be collective.

        The teller goes first, so that torchrun's report is about it; others go after it or when
        their launcher asks.
        """
        tells = failure.teller == self._me or failure.teller.node != self._me.node
        write_error_file(self._line(failure) if tells else f"ends with rank {failure.teller.rank}")
        sys.stdout.flush()
        sys.stderr.flush()
        if failure.teller == self._me:
            time.sleep(linger_s)
        else:
            self._asked.wait(2 * linger_s)
        os._exit(failure.exit_code)

    def _line(self, failure: Failure) -> str:
        return f"{self._prog}: {failure}"

    def _print(self, failure: Failure) -> None:
        if self._driver_tells:
            return
        if failure.kind == "usage":
            tell_mistake(self._line(failure))
        else:
            print(self._line(failure), file=sys.stderr, flush=True)


def _no_store(error: Exception) -> str:
    reason = str(error).partition("\n")[0]
    return f"the launcher of the first node is gone ({reason})"


def _abort(pid: int) -> None:
    """Make a stuck neighbour print its stacks and die; torchrun would wait 30 s for it."""
    with suppress(ProcessLookupError):  # it is gone
        for number in (signal.SIGABRT, signal.SIGCONT):
            os.kill(pid, number)


def _within(seconds: float, ask: Callable[[], T]) -> T:
    """What the store answers; ``DistError`` when it is gone or does not answer in time.

    For a rank that ends: its guard no longer watches over the store's silence.
    """
    answers: list[T] = []
    errors: list[dist.DistError] = []

    def run() -> None:
        try:
            answers.append(ask())
        except dist.DistError as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if answers:
        return answers[0]
    raise errors[0] if errors else dist.DistStoreError(f"no answer within {seconds:g} s")
