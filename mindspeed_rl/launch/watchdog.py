"""Notices that a rank failed, died or hangs, and ends all ranks with the cause.

Two threads per rank; neither does a collective, so they work while ranks are stuck in one.

- *heartbeat* talks to the launcher's store: it writes heartbeats, reads the published failure and
  watches one peer, rank + 1, so that every rank is watched by exactly one other.
- *guard* touches no network: it checks the phase against its deadline and receives SIGTERM and
  SIGINT, even while the main thread is inside C++.

The first failure counts and is printed once per node; its consequences end without a message.
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
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import Any, NoReturn

import torch.distributed as dist

from mindspeed_rl.core import owned_folders, stop_request
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.flights import Position, recent_lines, stuck_text
from mindspeed_rl.launch import run_lock
from mindspeed_rl.launch.attempt import Attempt, current_step, note_end
from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.launch.failure_store import (
    FailureStore,
    answer_within,
    connect,
    this_member,
)
from mindspeed_rl.launch.failures import (
    JOIN,
    LAST_FILES,
    START,
    Failure,
    Kind,
    WatchdogSettings,
    is_lost_connection,
    lost_failure,
    silent_failure,
    silent_ranks,
    whereabouts,
    write_error_file,
)
from mindspeed_rl.planning.phase_limits import LEARNING_STEPS, PhaseLimits
from mindspeed_rl.platforms import flight_recorder

# Signals that the guard receives, with the handlers to restore afterwards.
_HANDLED: dict[int, Any] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}
_NO_LAUNCHER = "the launcher of this node is gone"
_BETWEEN_BEATS_S = 0.005  # a run of tiny steps need not publish every phase
_ANSWER_S = 5.0  # how long a rank that ends waits for the answer of the store or of a rank


class PhaseClock:
    """The current phase of a rank, its begin and its deadline.

    Args:
        limits: Limits of the phases.
    """

    def __init__(self, limits: PhaseLimits) -> None:
        self._limits = limits
        self._longest_s = 0.0
        self._num_trained = 0
        self.current = (START, time.monotonic(), limits.of(START))
        """Name, begin and limit (in seconds) of the phase; always replaced as one tuple."""
        self.changed = threading.Event()
        """Set when a phase begins, so that it is published at once, however short it is."""

    @contextmanager
    def phase(self, name: str, limit_s: float | None = None) -> Iterator[None]:
        """Enter a phase with a new deadline; the end restores the outer phase with a new deadline.

        After an exception the inner phase stays, as the place where the job ended. After the first
        steps the longest phase over samples bounds the next ones.
        """
        before, _, limit_before = self.current
        if limit_s is None:
            known = self._num_trained >= LEARNING_STEPS
            limit_s = self._limits.of(name, self._longest_s if known else None)
        begin = time.monotonic()
        self.current = (name, begin, limit_s)
        self.changed.set()
        yield
        end = time.monotonic()
        self.current = (before, end, limit_before)
        if name in self._limits.over_samples:
            self._longest_s = max(self._longest_s, end - begin)
            self._num_trained += name == "train"

    @property
    def name(self) -> str:
        return self.current[0]

    @property
    def seconds(self) -> float:
        """Return how long the current phase has lasted."""
        return time.monotonic() - self.current[1]

    def overdue(self) -> str:
        """Return a message if the phase is over its limit, else an empty string."""
        phase, since, limit_s = self.current
        seconds = time.monotonic() - since
        if seconds <= limit_s:
            return ""
        if phase == JOIN:
            return f"exceeded --distributed-timeout-minutes {limit_s / 60:g} ({seconds:.0f} s)"
        return f"exceeded {limit_s:g} s, see --phase-timeout-s ({seconds:.0f} s)"


class Heartbeats:
    """The heartbeats of one rank, and its watch over the next rank.

    Args:
        store: Store of all ranks.
        world: Rank of this process and number of ranks.
        phases: Phase clock of this rank.
        settings: Interval of heartbeats, and how long a peer may be silent.
        position: Says where this rank stands in collectives.
    """

    def __init__(
        self,
        store: FailureStore,
        world: World,
        phases: PhaseClock,
        settings: WatchdogSettings,
        position: Callable[[], Position],
    ) -> None:
        self._store, self._world, self._phases = store, world, phases
        self._settings = settings
        self._position, self._answered = position, False
        self._peer = (world.rank + 1) % world.size
        self._peer_count, self._peer_seen_at = 0, time.monotonic()
        self._beat_phase: tuple[str, float, float] | None = None  # phase of the last heartbeat
        self._beat_at = 0.0

    def tick(self, *, leaving: bool = False) -> Failure | None:
        """Write a heartbeat after an interval or in another phase; call this often.

        Returns:
            The failure that ends this rank: the published one, or the silence of its peer.

        Raises:
            DistError: The store is gone.
        """
        phase, now = self._phases.current, time.monotonic()
        if phase is self._beat_phase and now - self._beat_at < self._settings.interval_s:
            return None
        self._beat_phase, self._beat_at = phase, now
        self._store.beat(self._phases.name, self._phases.seconds, leaving=leaving)
        if (published := self._store.published()) is not None:
            return published
        if not self._answered and self._store.is_asked():
            self._store.answer(self._position())
            self._answered = True
        beat = self._store.beats([self._peer]).get(self._peer)
        if beat is None or beat.count != self._peer_count or beat.leaving:
            self._peer_count, self._peer_seen_at = beat.count if beat else 0, now
        elif now - self._peer_seen_at > self._settings.silence_of(beat.phase):
            return silent_failure(beat, now - self._peer_seen_at, this_member(self._world))
        return None


class Watchdog:
    """The watchdog of one rank. Create and start it in the main thread.

    Args:
        world: Rank of this process and number of ranks.
        limits: Limits of the phases.
        prog: Name of the entry, for messages.
        settings: Waiting times, and who prints.
    """

    def __init__(
        self, world: World, limits: PhaseLimits, prog: str, settings: WatchdogSettings
    ) -> None:
        self._world = world
        self._everyone = range(world.size)
        self._prog = prog
        self._settings = settings
        self._me = this_member(world)
        self._launcher = os.getppid()
        self._phases = PhaseClock(limits)
        self._leaving = False  # this rank waits for the others to end
        self._left = threading.Event()
        self._asked = threading.Event()  # the launcher asked this rank to end
        self._ending = threading.Lock()
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for name, target in (("heartbeat", self._heartbeat), ("guard", self._guard))
        ]
        self._signals, self._wakeup = socket.socketpair()
        self._store = FailureStore(connect(world.rank, self._settings.connect_s), self._me)
        self._recorder = flight_recorder.install()
        position = self._recorder.position
        self._heartbeats = Heartbeats(self._store, world, self._phases, self._settings, position)

    def start(self) -> None:
        """Start the threads and take over the signals."""
        self._store.beat(START, 0.0)
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

    def phase(self, name: str, timeout_s: float | None = None) -> AbstractContextManager[None]:
        """Name the phase of this rank; see `PhaseClock.phase`."""
        return self._phases.phase(name, timeout_s)

    def newest_attempt(self, num_nodes: int) -> Attempt:
        """Return the attempt of the node that has seen most of them, when all have told theirs."""
        self._store.tell_attempt(Attempt.of_node())
        while not (told := self._store.attempts(num_nodes)):
            time.sleep(self._settings.poll_interval_s)
        return max(told)

    def leave(self) -> None:
        """Wait for all ranks, so that nobody closes connections that a peer still needs.

        Collective: the world. Afterwards a rank that ends is no failure, and exit handlers have a
        time limit.
        """
        with self.phase("exit"):
            self._leaving = True
            # After the barrier the store may go away with the first node's launcher.
            self._store.beat("exit", 0.0, leaving=True)
            dist.barrier()
        faulthandler.dump_traceback_later(self._settings.exit_s, exit=True)
        self._left.set()
        self._phases.changed.set()
        # A thread inside the store's C++ at the end of the interpreter aborts the process.
        for thread in self._threads:
            thread.join()
        signal.set_wakeup_fd(-1)
        for number, handler in _HANDLED.items():
            signal.signal(number, handler)

    def fail(self, error: BaseException) -> NoReturn:
        """Publish why this rank ends, print it unless a peer did, and leave at once."""
        self._claim_end()
        usage, lost = isinstance(error, UsageError), is_lost_connection(error)
        text = str(error) if usage else f"{type(error).__name__}: {error}"
        mine = self._failure("usage" if usage else "error", text)
        stands: Failure | None = None
        if lost:
            self._leave_if_orphaned()
            calls = self._recorder.position().calls
            where = f", rank {self._me.rank} that in {calls[-1]}" if calls else ""
            stands = self._find_cause(self._everyone, f"its peers lost their connection{where}")
            if stands is None:
                self._leave_if_orphaned()
        stands = stands or self._publish(mine)
        if stands == mine and not usage:
            traceback.print_exception(error)
        elif stands.text != text and not lost:
            self._print(mine)  # an independent failure, after the first one
        self._follow(stands)

    # -- the two threads -------------------------------------------------------------------------

    def _heartbeat(self) -> None:
        while not self._left.is_set():
            self._phases.changed.wait(self._settings.poll_interval_s)
            self._phases.changed.clear()
            self._left.wait(_BETWEEN_BEATS_S)
            try:
                failure = answer_within(
                    self._settings.silence_s, lambda: self._heartbeats.tick(leaving=self._leaving)
                )
            except dist.DistError as error:
                if self._leaving:  # the first node has ended earlier
                    return
                self._claim_end()
                self._leave_alone(_no_store(error))
            if failure is not None:
                if failure.kind == "silent" and failure.reporter == self._me:
                    failure = replace(failure, text=failure.text + self._stuck())
                self._end(failure)
            if os.getppid() != self._launcher:
                self._claim_end()
                self._leave_alone(_NO_LAUNCHER)

    def _guard(self) -> None:
        while not self._left.is_set():
            if select.select([self._signals], [], [], self._settings.interval_s / 2)[0]:
                self._end_on_signal(self._signals.recv(1)[0])
            if text := self._phases.overdue():
                phase = self._phases.name
                with suppress(dist.DistError):  # the store may not answer
                    beats = answer_within(_ANSWER_S, lambda: self._store.beats(self._everyone))
                    text += f". Where the ranks are: {whereabouts(beats.values())}"
                    text += self._stuck()
                self._end(self._failure("hang", text, phase))

    def _end_on_signal(self, number: int) -> None:
        if number not in _HANDLED:  # a library installed a handler for it
            return
        if number == signal.SIGTERM and (self._leaving or self._phases.name == LAST_FILES):
            self._finish_unless_neighbour_is_gone()
            return
        if number == signal.SIGTERM and self._settings.saves_at_sigterm:
            self._save_unless_neighbour_is_gone()
            return
        self._asked.set()
        self._claim_end()
        name = signal.Signals(number).name
        stopped = self._failure("stopped", f"{name} from the launcher or its user")
        if number == signal.SIGINT:
            self._follow(self._publish(stopped))
        self._follow(self._failure_of_node() or self._publish(stopped))

    def _save_unless_neighbour_is_gone(self) -> None:
        """Ask the loop to save and end after its step; later signals change nothing."""
        if failure := self._failure_of_node():
            self._asked.set()
            self._end(failure)
        elif not stop_request.is_asked():
            stop_request.ask()
            print(
                f"{self._prog}: SIGTERM at rank {self._me.rank}: the run saves after this step "
                "and ends (--exit-signal-handler)",
                file=sys.stderr,
                flush=True,
            )

    def _finish_unless_neighbour_is_gone(self) -> None:
        """Let a job that is done write its last files, and end as it would have."""
        if failure := self._failure_of_node():
            self._asked.set()
            self._end(failure)
        elif not self._leaving:
            print(
                f"{self._prog}: SIGTERM at rank {self._me.rank}: the run is done; it writes its "
                "last files and ends",
                file=sys.stderr,
                flush=True,
            )

    def _failure_of_node(self) -> Failure | None:
        """Return the failure for which torchrun ends the ranks of a node with SIGTERM, if any."""
        first = self._world.rank - self._world.local_rank
        neighbours = range(first, first + self._world.local_size)
        return self._find_cause(neighbours, "torchrun ends its node")

    # -- the end ---------------------------------------------------------------------------------

    def _failure(self, kind: Kind, text: str, phase: str = "") -> Failure:
        phase = phase or self._phases.name
        return Failure(kind, self._me, phase, text, self._me, current_step())

    def _stuck(self) -> str:
        """Ask all ranks where they stand, and say who is missing in which collective.

        A rank that computes in Python for ever answers as well, but its threads get the lock late.
        """
        answers_s = self._settings.interval_s + _ANSWER_S
        deadline = time.monotonic() + answers_s
        found: dict[int, Position] = {}
        try:
            answer_within(_ANSWER_S, self._store.ask)
            answer_within(_ANSWER_S, lambda: self._store.answer(self._recorder.position()))
            while len(found) < self._world.size and time.monotonic() < deadline:
                time.sleep(self._settings.poll_interval_s)
                found = answer_within(_ANSWER_S, lambda: self._store.positions(self._everyone))
            beats = answer_within(_ANSWER_S, lambda: self._store.beats(self._everyone))
        except dist.DistError:  # the store ended with the first node
            return ""
        return stuck_text(found, {rank: beat.phase for rank, beat in beats.items()})

    def _find_cause(self, ranks: range, evidence: str) -> Failure | None:
        """Return the failure that caused this rank's: a published one, or that of a silent peer."""
        deadline = time.monotonic() + self._settings.cause_timeout_s
        try:
            before = answer_within(_ANSWER_S, lambda: self._store.beats(ranks))
            while time.monotonic() < deadline:
                published = answer_within(_ANSWER_S, self._store.published)
                if published is not None:
                    return published
                time.sleep(self._settings.poll_interval_s)
            after = answer_within(_ANSWER_S, lambda: self._store.beats(ranks))
        except dist.DistError:  # the store ended with the first node
            return None
        after.pop(self._me.rank, None)
        gone = silent_ranks(before, after)
        return self._publish(lost_failure(gone, evidence, self._me)) if gone else None

    def _publish(self, failure: Failure) -> Failure:
        """Publish a failure and return the job's first one, or this one if the store is silent."""
        try:
            return answer_within(_ANSWER_S, lambda: self._store.publish(failure))
        except dist.DistError:
            return failure

    def _claim_end(self) -> None:
        """Let one thread end this process; other threads block here."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()

    def _end(self, failure: Failure) -> NoReturn:
        self._claim_end()
        self._follow(self._publish(failure))

    def _leave_if_orphaned(self) -> None:
        """End this rank if a launcher is gone: its ranks lose connections, which is no cause."""
        if os.getppid() != self._launcher:
            self._leave_alone(_NO_LAUNCHER)
        try:
            answer_within(_ANSWER_S, self._store.published)
        except dist.DistError as error:
            self._leave_alone(_no_store(error))

    def _leave_alone(self, text: str) -> NoReturn:
        """End without contact to other ranks; the first rank of the node prints the failure."""
        failure = self._failure("lost", text)
        if self._world.local_rank == 0:
            self._print(failure)
        self._exit(failure, 0.0)

    def _follow(self, failure: Failure) -> NoReturn:
        """Report the failure that ends the job, once per node, and leave."""
        reporter, here = failure.reporter, self._me
        if failure.kind == "usage" and current_step() is None:
            run_lock.release(refused=True)
        if reporter == here or (reporter.node != here.node and self._world.local_rank == 0):
            self._print(failure)
        if failure.with_stacks:
            print(f"stacks of rank {here.rank}:", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(all_threads=True)
            calls = "\n".join(recent_lines(self._recorder.recent()))
            print(f"last collectives of rank {here.rank}:\n{calls}", file=sys.stderr, flush=True)
            self._print_device_trace()
        failed = failure.failed
        if failure.kind == "silent" and failed.node == here.node and failed != here:
            _abort(failed.pid)
        self._exit(failure, self._settings.exit_grace_s)

    def _print_device_trace(self) -> None:
        """Print what NCCL has not done yet; nothing where its recorder does not answer."""
        with suppress(dist.DistError):
            if lines := answer_within(_ANSWER_S, flight_recorder.device_lines):
                told = "\n".join(lines)
                title = f"not done by NCCL on rank {self._me.rank}:"
                print(f"{title}\n{told}", file=sys.stderr, flush=True)

    def _exit(self, failure: Failure, grace_s: float) -> NoReturn:
        """Leave without exit handlers, which may be collective.

        The reporter leaves first, so that torchrun's report names it; others wait for it or until
        their launcher asks them to end.
        """
        reports = failure.reporter == self._me or failure.reporter.node != self._me.node
        line = f"{self._prog}: {failure}"
        note_end(failure.kind, failure.phase, str(failure), failure.step)
        write_error_file(line if reports else f"ends with rank {failure.reporter.rank}")
        sys.stdout.flush()
        sys.stderr.flush()
        owned_folders.remove_mine()
        owned_folders.sweep()  # those of a neighbour that was killed
        if failure.reporter == self._me:
            time.sleep(grace_s)
        else:
            self._asked.wait(2 * grace_s)
        os._exit(failure.exit_code)

    def _print(self, failure: Failure) -> None:
        if not self._settings.driver_reports:
            print(f"{self._prog}: {failure}", file=sys.stderr, flush=True)


def _no_store(error: Exception) -> str:
    reason = str(error).partition("\n")[0]
    return f"the launcher of the first node is gone ({reason})"


def _abort(pid: int) -> None:
    """Make a stuck neighbour print its stacks and die; torchrun would wait 30 s for it."""
    with suppress(ProcessLookupError):  # it has ended already
        for number in (signal.SIGABRT, signal.SIGCONT):
            os.kill(pid, number)
