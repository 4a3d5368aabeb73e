"""Starts torchrun jobs, waits for their end, and looks for what they left behind."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from support.warm_ranks import MARKED_FILE, SERVER, Rank

ROOT = Path(__file__).resolve().parents[2]
DRIVER = str(ROOT / "tests" / "support" / "rl_driver.py")
MARKER = "MINDSPEED_RL_TEST_JOB"
LEFTOVER_S = 30.0


def planted(fault: str, main: str = "rehearsal") -> dict[str, str]:
    """The environment of the driver; see `rl_driver`."""
    return {"MINDSPEED_RL_TEST_MAIN": main, "MINDSPEED_RL_TEST_FAULT": fault}


def free_port() -> int:
    """A port that nothing uses, and that the system gives to no connection meanwhile.

    Linux takes the ports of connections from 32768 on; of those below, two tests rarely draw one.
    """
    while True:
        port = random.SystemRandom().randint(20000, 32000)  # whatever seed a test has set
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port


@dataclass(frozen=True, slots=True)
class Ended:
    """A job that ended: its output (of all agents, in turn) and the seconds since the fault."""

    returncodes: tuple[int, ...]
    output: str
    seconds: float


class TorchrunJob:
    """One job of one or more torchrun agents on this machine; a context that leaves nothing.

    By default agents and ranks are forks of a process that has imported the libraries.

    Args:
        folder: working directory; the logs go there.
        target: a script, or ``-m`` and a module.
        flags: of the entry.
        num_ranks: per agent.
        port: of the store; by default a free one.
        num_nodes: agents.
        environment: added to this process's.
        node_flags: further flags of each agent's ranks.
        fresh: whether agents and ranks are new processes, which import everything by themselves.
    """

    def __init__(
        self,
        folder: Path,
        target: Sequence[str],
        flags: Sequence[str],
        *,
        num_ranks: int = 2,
        port: int | None = None,
        num_nodes: int = 1,
        environment: Mapping[str, str] | None = None,
        node_flags: Sequence[Sequence[str]] = (),
        fresh: bool = False,
    ) -> None:
        self.marker, port = uuid.uuid4().hex, port or free_port()
        self.agents: list[subprocess.Popen[bytes] | Rank] = []
        self._logs: list[Path] = []
        for node in range(num_nodes):
            arguments = [
                "--nproc-per-node", str(num_ranks), "--nnodes", str(num_nodes),
                "--node-rank", str(node), "--master-addr", "127.0.0.1",
                "--master-port", str(port), *target, *flags,
                *(node_flags[node] if node_flags else ()),
            ]  # fmt: skip
            start = self._start if fresh else self._fork
            start(folder, node, arguments, dict(environment or {}) | {MARKER: self.marker})

    def _start(
        self, folder: Path, node: int, arguments: list[str], environment: dict[str, str]
    ) -> None:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._logs.append(folder / f"{self.marker}.{node}.log")
        with self._logs[-1].open("wb") as log:
            agent = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *arguments],
                cwd=folder, env=os.environ | {"PYTHONPATH": path} | environment,
                stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        self.agents.append(agent)

    def _fork(
        self, folder: Path, node: int, arguments: list[str], environment: dict[str, str]
    ) -> None:
        assert "PYTHONPATH" not in environment, "forks have imported what is on their path"
        own = folder / self.marker
        own.mkdir(exist_ok=True)
        command = {"arguments": arguments, "cwd": str(folder)}
        (own / f"agent{node}.json").write_text(json.dumps(command))
        self._logs.append(own / f"rank{node}.log")
        self._logs[-1].touch()
        path = os.pathsep.join([str(ROOT), *(entry for entry in sys.path if entry)])
        variables = os.environ | {"PYTHONPATH": path, "RANK": str(node)} | environment
        self.agents.append(SERVER.start(own, variables, "support.forked_torchrun"))

    def __enter__(self) -> TorchrunJob:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in processes_of(self.marker):
            os.kill(pid, signal.SIGKILL)
        for agent in self.agents:
            if agent.poll() is None:  # one that has hardly begun has no marker yet
                agent.kill()
            agent.wait()

    def output(self) -> str:
        return "".join(file.read_text(errors="replace") for file in self._logs)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> float:
        """Seconds until ``condition()``; an ``AssertionError`` with the log when it never holds."""
        start = time.monotonic()
        while not condition():
            waited = time.monotonic() - start
            assert waited < timeout_s, f"nothing after {waited:.0f} s\n{self.output()}"
            time.sleep(0.05)
        return time.monotonic() - start

    def wait_for_text(self, text: str, timeout_s: float) -> None:
        """Return when the job has said ``text``; an ``AssertionError`` when it ends without."""
        self.wait_for(lambda: text in self.output() or self._ended(), timeout_s)
        assert text in self.output(), self.output()

    def _ended(self) -> bool:
        return all(agent.poll() is not None for agent in self.agents)

    def end(self, timeout_s: float) -> Ended:
        """Wait for all agents, then until nothing of the job is left."""
        seconds = self.wait_for(self._ended, timeout_s)
        self.wait_for(lambda: not processes_of(self.marker), LEFTOVER_S)
        return Ended(tuple(a.returncode for a in self.agents), self.output(), seconds)


def run_to_end(
    command: Sequence[str], timeout_s: float, environment: Mapping[str, str], cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run a command that starts others; none of them outlives it or its limit.

    Args:
        command: program and arguments.
        timeout_s: after which all of it is killed, and ``subprocess.TimeoutExpired`` raised.
        environment: added to this process's.
        cwd: working directory.

    Returns:
        Exit status and output, stderr within stdout.
    """
    marker = uuid.uuid4().hex
    try:
        return subprocess.run(
            command, cwd=cwd, env=os.environ | dict(environment) | {MARKER: marker},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s,
        )  # fmt: skip
    finally:
        for pid in processes_of(marker):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def processes_of(marker: str) -> list[int]:
    """Living processes of a job.

    They inherited its marker: a new process in its environment, a fork by an open file.
    """
    wanted = f"{MARKER}={marker}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            open_file = folder / "fd" / str(MARKED_FILE)
            of_fork = open_file.is_symlink() and marker in os.readlink(open_file)
        except OSError:  # it has just ended, or is another user's
            continue
        if of_fork or wanted in variables:
            found.append(int(folder.name))
    return found


def shared_memory_left() -> set[str]:
    """Names in shared memory that belong to jobs of this project none of whose owners lives."""
    roots = (Path(tempfile.gettempdir()), Path("/dev/shm"))
    folders = [path for root in roots for path in root.glob("mindspeed_rl-*") if path.is_dir()]
    living = {path.name.rpartition("-")[2] for path in folders if _is_locked(path / ".owner")}
    names = {path.name for path in Path("/dev/shm").glob("*mindspeed_rl-*")}
    return {name for name in names if not any(key in name for key in living)}


def _is_locked(path: Path) -> bool:
    try:
        with path.open("r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:  # its owner lives
        return True
    return False
