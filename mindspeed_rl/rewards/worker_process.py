"""A reward worker as its pool sees it: a process with a hard limit on every sample.

The process is a plain subprocess: the spawn method of ``multiprocessing`` would import the parent's
``__main__``, hence torch, with the parent's rank and preloads, and fork would copy the locks of its
threads. The messages are those of a `multiprocessing.connection.Connection`.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.rewards.types import (
    RewardError,
    RewardRequest,
    RewardResult,
    RewardSettings,
    RewardStatus,
)

logger = logging.getLogger(__name__)

START_LIMIT_S = 120.0  # user files may import torch from a cold network file system
EXIT_GRACE_S = 1.0  # lets a worker that is ending do so, so that its exit code is its own
MAX_LOGGED_CHARS = 300
# A worker must neither look like a training rank nor load the trainer's allocator.
_DROPPED = frozenset({"LD_PRELOAD", "RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"})
_DROPPED_PREFIXES = ("LOCAL_", "MASTER_", "ROLE_", "TORCHELASTIC_")
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Ready:
    """Message of a worker: its functions are loaded, its limits are set.

    Attributes:
        notices: Remarks of the rewards about this machine.
        concurrency: Number of samples it can work on at a time; above 1 where it waits for others.
    """

    notices: tuple[str, ...]
    concurrency: int


@dataclass(frozen=True, slots=True)
class Scored:
    """Message of a worker: the result of the oldest sample that it holds.

    Attributes:
        result: Result of the sample.
        is_last: Whether the worker ends now; it has not started the other samples.
    """

    result: RewardResult
    is_last: bool = False


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the parent's environment less its rank and preloads, able to import this package."""
    result = {
        name: value
        for name, value in environment.items()
        if name not in _DROPPED and not name.startswith(_DROPPED_PREFIXES)
    }
    package_parent = str(Path(__file__).resolve().parents[2])
    inherited = result.get("PYTHONPATH")
    result["PYTHONPATH"] = os.pathsep.join(filter(None, (package_parent, inherited)))
    result.update(dict.fromkeys(_ONE_THREAD, "1"))
    return result


class WorkerProcess:
    """One worker. Whatever happens to its process, every sample sent gets one result, in order.

    A process that hangs or dies costs the oldest sample that it holds: the one that it was
    scoring. Its successor scores the others. Used by one thread; on Linux the process dies with
    the thread that started it.

    Attributes:
        ready: Whether the functions are loaded.
        notices: See `Ready`.
        concurrency: See `Ready`.
    """

    def __init__(self, settings: RewardSettings) -> None:
        self.ready = False
        self.notices: tuple[str, ...] = ()
        self.concurrency = 1
        self._settings = settings
        self._held: deque[RewardRequest] = deque()  # sent but not answered, oldest first
        self._deadline_s = 0.0  # of its present work: starting, or the oldest sample
        self._cut_off = False  # a message to it may have been sent in part only
        self._end: Callable[[], None] = lambda: None

    @property
    def pid(self) -> int:
        return self._process.pid

    def restart(self) -> None:
        self._held.clear()
        self._replace()

    def close(self) -> None:
        """Kill the process and all it started, free connection and temporary files. Idempotent."""
        self._end()
        self._end = lambda: None

    def send(self, request: RewardRequest) -> None:
        """Send a sample; waits at most for the limit of a sample, even for a stopped worker.

        A worker that died after its last sample is replaced first: that costs no sample.
        """
        if self.ready and not self._held and self._connection.poll():
            self._replace()
        self._held.append(request)
        if self.ready:
            if len(self._held) == 1:
                self._start_clock()
            self._write(request)

    def receive(self, wait_s: float) -> RewardResult | None:
        """Return the oldest sample's result; ``None`` when there is none after ``wait_s``.

        Raises:
            UsageError: a reward cannot be loaded.
            RewardError: the worker does not start.
        """
        now_s = time.monotonic()
        if self._connection.poll(max(0.0, min(wait_s, self._deadline_s - now_s))):
            return self._read()
        # However late this process was scheduled, no worker is killed for an answer not yet read.
        return self._overdue() if self._deadline_s <= now_s else None

    def _read(self) -> RewardResult | None:
        try:
            message = self._connection.recv()
        except (EOFError, OSError):
            return self._ended()
        if isinstance(message, UsageError):
            raise message
        if isinstance(message, Ready):
            self.ready, self.notices = True, message.notices
            self.concurrency = message.concurrency
            self._start_clock()
            for request in self._held:
                self._write(request)
            return None
        self._held.popleft()
        self._start_clock()
        if message.is_last or self._cut_off:
            self._replace()
        result: RewardResult = message.result
        return result

    def _ended(self) -> RewardResult:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_GRACE_S)
        self.close()
        code = self._process.returncode
        if not self.ready:
            raise RewardError(
                f"a reward worker ended with exit code {code} before it was ready; "
                "its own error message is above, on stderr"
            )
        return self._fail(
            "error",
            None,
            f"the reward worker ended with exit code {code} (negative: killed by that signal, -9 "
            "is often the kernel's out-of-memory killer) while scoring this sample",
        )

    def _overdue(self) -> RewardResult | None:
        if not self.ready:
            raise RewardError(f"a reward worker was not ready after {START_LIMIT_S:.0f} s")
        flags = self._settings.flags
        detail = f"no score within {flags.reward_timeout_s:g} s"
        return self._fail("timeout", flags.reward_timeout_score, detail)

    def _fail(self, status: RewardStatus, reward: float | None, detail: str) -> RewardResult:
        """Fail the oldest sample, which has cost the process, and replace the process."""
        request = self._held.popleft()
        logger.warning(
            "sample %d: %s; reward %s, its worker is replaced; response: %.*r",
            request.sample_id,
            detail,
            reward,
            MAX_LOGGED_CHARS,
            request.response,
        )
        self._replace()
        return RewardResult(request.sample_id, reward, {}, status, detail)

    def _start_clock(self) -> None:
        self._deadline_s = time.monotonic() + self._settings.flags.reward_timeout_s

    def _write(self, message: object) -> None:
        try:
            self._connection.send(message)
        except BlockingIOError:  # the socket's time limit: half a message may have been sent
            self._cut_off, self._deadline_s = True, 0.0
        except (BrokenPipeError, ConnectionResetError):
            pass  # reported by receive(), after the results still in it

    def _replace(self) -> None:
        """Kill the process and start another, which gets the held samples when it is ready."""
        self.close()
        self.ready = self._cut_off = False
        with ExitStack() as stack:
            # The process needs a folder that this one removes: a killed process cleans nothing up.
            folder = TemporaryDirectory(prefix="mindspeed_rl-reward-", ignore_cleanup_errors=True)
            temporary = stack.enter_context(folder)
            mine, its = socket.socketpair()
            limit_s = self._settings.flags.reward_timeout_s
            limit = struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6))
            mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._connection = stack.enter_context(Connection(mine.detach()))
            with its:
                command = [sys.executable, "-m", "mindspeed_rl.rewards.worker"]
                self._process = subprocess.Popen(
                    [*command, str(its.fileno()), str(os.getpid())],
                    pass_fds=(its.fileno(),),
                    env=worker_environment(os.environ) | {"TMPDIR": temporary},
                    stdin=subprocess.DEVNULL,
                    # A session of its own, so that the kill reaches what the functions started.
                    start_new_session=True,
                )
            stack.callback(_kill, self._process)
            self._end = stack.pop_all().close
        self._deadline_s = time.monotonic() + START_LIMIT_S
        self._write(self._settings)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:
        # Before wait(): until the leader is reaped its id cannot name another group.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
