"""One reward worker as its pool sees it: the process, the socket, the samples it holds."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mindspeed_rl.config.reward_spec import RewardSpec
from mindspeed_rl.rewards import wire
from mindspeed_rl.rewards.settings import RewardSettings
from mindspeed_rl.rewards.types import RewardRequest

_RECEIVE_BYTES = 1 << 18
# A worker must neither look like a training rank nor load the trainer's allocator.
_DROPPED = frozenset({"LD_PRELOAD", "RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"})
_DROPPED_PREFIXES = ("LOCAL_", "MASTER_", "ROLE_", "TORCHELASTIC_")
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """The first message to a worker.

    Attributes:
        specs: the reward functions to load.
        memory_limit_bytes: address space a worker may use on top of its imports; ``None`` for no
            limit.
        settings: of the built-in rewards.
    """

    specs: tuple[RewardSpec, ...]
    memory_limit_bytes: int | None
    settings: RewardSettings = field(default_factory=RewardSettings)


@dataclass(frozen=True, slots=True)
class Ready:
    """What a worker says when its functions are loaded.

    Attributes:
        notices: what they have to say about this machine.
        at_once: samples that it can work on at a time; more than 1 where it waits for others.
    """

    notices: tuple[str, ...]
    at_once: int


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The parent's environment less its rank and preloads, able to import this package."""
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
    """A worker process and what the pool knows about it.

    Started with ``subprocess`` and not ``multiprocessing``: a spawned child of the latter would
    import the parent's ``__main__``, hence torch, and a forked one would copy its threads' locks.

    Attributes:
        pending: positions of the samples sent and not answered, in the worker's order.
        ready: whether the functions are loaded.
        at_once: samples that it can work on at a time.
        retiring: whether the worker said that it exits after its last result.
        closed: whether the other end of the socket is closed: the worker is dead or about to be.
        deadline_s: `time.monotonic` at which what it does now (start, a sample) has taken too long.
    """

    def __init__(self, setup: WorkerSetup, deadline_s: float) -> None:
        self.pending: deque[int] = deque()
        self.ready = False
        self.at_once = 1
        self.retiring = False
        self.closed = False
        self.deadline_s = deadline_s
        self.connection, child_end = socket.socketpair()
        self._incoming = wire.FrameBuffer()
        self._outgoing = bytearray()
        self.connection.setblocking(False)
        command = [sys.executable, "-m", "mindspeed_rl.rewards.worker"]
        # Of its own, because what is killed cleans nothing up.
        self._temporary = tempfile.mkdtemp(prefix="mindspeed_rl-reward-")
        try:
            with child_end:
                self.process = subprocess.Popen(
                    [*command, str(child_end.fileno()), str(os.getpid())],
                    pass_fds=(child_end.fileno(),),
                    env=worker_environment(os.environ) | {"TMPDIR": self._temporary},
                    stdin=subprocess.DEVNULL,
                    # A group of its own, so that kill() reaches what the functions started.
                    start_new_session=True,
                )
        except BaseException:
            self.connection.close()
            shutil.rmtree(self._temporary, ignore_errors=True)
            raise
        self._send(wire.Kind.SETUP, setup)

    @property
    def has_unsent(self) -> bool:
        """Whether bytes wait for the socket to become writable."""
        return bool(self._outgoing)

    @property
    def room(self) -> int:
        """Samples that it could begin with now."""
        return max(0, self.at_once - len(self.pending)) if self.ready and not self.closed else 0

    def send_requests(self, positions: Sequence[int], requests: Sequence[RewardRequest]) -> None:
        """Queue samples; ``positions`` come back in `pending`."""
        self._send(wire.Kind.SCORE, list(requests))
        self.pending.extend(positions)

    def _send(self, kind: wire.Kind, payload: object) -> None:
        self._outgoing += wire.encode(kind, payload)
        self.flush()

    def flush(self) -> None:
        """Write what the socket takes now. Never blocks: a stuck worker does not read."""
        # A broken connection is reported by receive(), after the results still in it.
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._outgoing:
                del self._outgoing[: self.connection.send(self._outgoing)]

    def receive(self) -> list[wire.Message]:
        """Messages that have arrived; sets `closed` at the end of the stream. Never blocks."""
        try:
            data = self.connection.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            data = b""
        self.closed = not data
        return self._incoming.feed(data)

    def kill(self, grace_s: float = 0.0) -> int:
        """End the process and all it started, reap it, free socket and temporary files.

        Args:
            grace_s: how long to let a worker that is exiting by itself finish, so that its exit
                code and its traceback on stderr are its own.

        Returns:
            Its exit code.
        """
        if grace_s > 0:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(grace_s)
        if self.process.returncode is None:
            # Before wait(): until the leader is reaped its id cannot name another group.
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.connection.close()
        code = self.process.wait()
        shutil.rmtree(self._temporary, ignore_errors=True)
        return code
