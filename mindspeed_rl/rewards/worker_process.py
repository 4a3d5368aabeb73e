"""A reward worker as its pool sees it: a process with a hard limit on every sample.

The process is a plain subprocess: the spawn method of ``multiprocessing`` would import the parent's
``__main__``, hence torch, with the parent's rank and preloads, and fork would copy the locks of its
threads. It gets pickled objects and answers in JSON (`wire`), over a pair of sockets that nobody
else can open.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.owned_folders import owned_folder
from mindspeed_rl.core.redaction import without_secrets
from mindspeed_rl.rewards import wire
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
MAX_TOLD = 5  # samples of a batch that get a line each when they cost their worker
# A worker must neither look like a training rank nor load the trainer's allocator.
_DROPPED = frozenset({"LD_PRELOAD", "RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"})
_DROPPED_PREFIXES = ("LOCAL_", "MASTER_", "ROLE_", "TORCHELASTIC_")
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def worker_environment(
    environment: Mapping[str, str], secrets: Collection[str] = ()
) -> dict[str, str]:
    """Return the environment of a worker, which is able to import this package.

    Args:
        environment: The parent's, of which rank, preloads and secrets are left out.
        secrets: Names of secrets that the worker gets.
    """
    result = {
        name: value
        for name, value in without_secrets(environment, secrets).items()
        if name not in _DROPPED and not name.startswith(_DROPPED_PREFIXES)
    }
    package_parent = str(Path(__file__).resolve().parents[2])
    inherited = result.get("PYTHONPATH")
    result["PYTHONPATH"] = os.pathsep.join(filter(None, (package_parent, inherited)))
    result.update(dict.fromkeys(_ONE_THREAD, "1"))
    return result


class FewLines:
    """Warnings about samples: a line each for the first ones, then a number. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def warn(self, text: str, *values: object) -> None:
        """Log a warning unless `MAX_TOLD` were logged since the last `close`."""
        with self._lock:
            self._count += 1
            told = self._count <= MAX_TOLD
        if told:
            logger.warning(text, *values)

    def close(self) -> None:
        """Log how many were left out, and begin anew."""
        with self._lock:
            left_out, self._count = self._count - MAX_TOLD, 0
        if left_out > 0:
            logger.warning("%d more samples had no score, each like the ones above", left_out)


failed_samples = FewLines()
"""Those of all workers of this process."""


class WorkerProcess:
    """One worker. Whatever happens to its process, every sample sent gets one result, in order.

    A process that hangs or dies costs the oldest sample that it holds: the one that it was
    scoring. Its successor scores the others. A first SIGKILL, which comes from outside, costs
    none: the sample is scored once more. Used by one thread; on Linux the process dies with
    the thread that started it.

    Attributes:
        ready: Whether the functions are loaded.
        notices: See `wire.Ready`.
        concurrency: See `wire.Ready`.
    """

    def __init__(self, settings: RewardSettings) -> None:
        self.ready = False
        self.notices: tuple[str, ...] = ()
        self.concurrency = 1
        self._settings = settings
        self._held: deque[RewardRequest] = deque()  # sent but not answered, oldest first
        self._deadline_s = 0.0  # of its present work: starting, or the oldest sample
        self._again: RewardRequest | None = None  # its worker was killed from outside
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
            message = wire.decode(self._connection.recv_bytes(wire.MAX_BYTES))
            self._check(message)
        except (EOFError, ConnectionResetError):
            return self._ended()
        except (OSError, wire.WireError) as error:  # too long, not sent to its end, or no message
            return self._talks_nonsense(error)
        if isinstance(message, UsageError):
            raise message
        if isinstance(message, wire.Ready):
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
        return message.result

    def _check(self, message: wire.WorkerMessage) -> None:
        """Refuse a message that does not belong to what the worker was given."""
        if isinstance(message, wire.Scored):
            held = self._held[0].sample_id if self.ready and self._held else None
            if message.result.sample_id != held:
                raise wire.WireError(f"the result of a sample other than {held}")
        elif self.ready:
            raise wire.WireError("it was ready before")

    def _talks_nonsense(self, error: Exception) -> RewardResult:
        what = f"what the reward worker sent is no message of the pool: {error}"
        if not self.ready or not self._held:
            self.close()
            raise RewardError(f"{what}; does a reward function write to its file descriptors?")
        return self._fail("error", None, what)

    def _ended(self) -> RewardResult | None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_GRACE_S)
        self.close()
        code = self._process.returncode
        if not self.ready:
            raise RewardError(
                f"a reward worker ended with exit code {code} before it was ready; "
                "its own error message is above, on stderr"
            )
        if code == -signal.SIGKILL and self._again is not self._held[0]:
            self._again = self._held[0]
            logger.warning("sample %d: its worker was killed; once more", self._again.sample_id)
            self._replace()
            return None
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
        failed_samples.warn(
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
            temporary = stack.enter_context(owned_folder("reward"))
            mine, its = socket.socketpair()
            limit_s = self._settings.flags.reward_timeout_s
            limit = struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6))
            # Neither end of a message may keep this thread: a worker may be stopped within one.
            mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            mine.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._connection = stack.enter_context(Connection(mine.detach()))
            with its:
                command = [sys.executable, "-m", "mindspeed_rl.rewards.worker"]
                self._process = subprocess.Popen(
                    [*command, str(its.fileno()), str(os.getpid())],
                    pass_fds=(its.fileno(),),
                    env=worker_environment(os.environ, self._settings.flags.reward_secrets)
                    | {"TMPDIR": temporary},
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
