"""The processes in which agents run, as the leader of an engine sees them.

All of this runs in one thread, that of the server's event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from mindspeed_rl.core.agents import AGENT_FLAG, AgentConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.endpoint.tasks import AgentTask
from mindspeed_rl.rewards.worker_process import worker_environment

logger = logging.getLogger(__name__)

START_LIMIT_S = 120.0  # agent frameworks may be imported from a cold network file system
EXIT_GRACE_S = 1.0
_LINE_LIMIT = 2**24
_SHOWN = 80  # bytes of a wrong line


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """How an agent ended.

    Attributes:
        reward: What it returned.
        raised: Traceback of what it raised; empty: nothing.
        lost: Why it did not come to its end; empty: it did.
    """

    reward: float | None = None
    raised: str = ""
    lost: str = ""


def read_end(line: bytes) -> tuple[int, AgentEnd]:
    """Return the number of an agent and how it ended, from a line of its process. Pure.

    The process runs code of others, so a line may be anything.

    Raises:
        ValueError: It is no such line.
    """
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deep") from None
    fields: dict[str, Any] = message if isinstance(message, dict) else {}
    number, kinds = fields.get("number"), fields.keys() - {"number"}
    if type(number) is int:
        reward, raised = fields.get("reward"), fields.get("raised")
        is_number = type(reward) is float and math.isfinite(reward)
        if kinds == {"reward"} and (reward is None or is_number):
            return number, AgentEnd(reward)
        if kinds == {"raised"} and isinstance(raised, str):
            return number, AgentEnd(raised=raised)
    raise ValueError(f"unknown fields: {line[:_SHOWN]!r}")


def agent_environment(environ: Mapping[str, str], flags: AgentConfig) -> dict[str, str]:
    """Return the variables of a process of agents, whose clients use no proxy to the endpoint."""
    found = worker_environment(environ, flags.rl_agent_secrets)
    for name in ("NO_PROXY", "no_proxy"):
        found[name] = ",".join(filter(None, (found.get(name), flags.rl_endpoint_host)))
    return found


class _Process:
    """One process of agents."""

    def __init__(self) -> None:
        self.running: set[int] = set()
        self.retiring = False  # it has an agent that does not end
        self.popen: subprocess.Popen[bytes] | None = None
        self.writer: asyncio.StreamWriter | None = None
        self.follower: asyncio.Task[None] | None = None

    async def start(self, flags: AgentConfig) -> asyncio.StreamReader:
        """Start the process and wait until it has loaded the agent.

        Raises:
            UsageError: The agent cannot be loaded, or is not ready in time.
        """
        mine, its = socket.socketpair()
        with its:
            self.popen = subprocess.Popen(
                [
                    *(sys.executable, "-m", "mindspeed_rl.endpoint.worker"),
                    *(str(its.fileno()), str(os.getpid()), flags.rl_agent),
                ],
                pass_fds=(its.fileno(),),
                env=agent_environment(os.environ, flags),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # so that the kill reaches what the agents started
            )
        reader, self.writer = await asyncio.open_unix_connection(sock=mine, limit=_LINE_LIMIT)
        where = f"{AGENT_FLAG} {flags.rl_agent}"
        try:
            line = await asyncio.wait_for(reader.readline(), START_LIMIT_S)
        except TimeoutError as error:
            raise UsageError(
                f"{where}: its process was not ready after {START_LIMIT_S:.0f} s; what does the "
                "file do when it is imported?"
            ) from error
        message = json.loads(line) if line else {"unusable": f"{where}: {await self.ending()}"}
        if "unusable" in message:
            raise UsageError(message["unusable"])
        return reader

    def send(self, number: int, task: AgentTask) -> None:
        assert self.writer is not None
        self.running.add(number)
        line = json.dumps({"number": number, **asdict(task)}, default=str)
        self.writer.write(line.encode() + b"\n")

    async def ending(self) -> str:
        """Wait for the end of a process that has closed its connection, and name it."""
        assert self.popen is not None
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self.popen.wait, EXIT_GRACE_S)
        return (
            f"its process ended with exit code {self.popen.poll()} (negative: killed by that "
            "signal, -9 is often the kernel's out-of-memory killer)"
        )

    def kill(self) -> None:
        """Kill the process and all that its agents started. Idempotent."""
        if self.writer is not None:
            self.writer.close()
        if self.popen is None:
            return
        if self.popen.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()


class AgentProcesses:
    """Runs agents in processes, so many at once; the others wait for their turn.

    An agent that is killed with its process costs the samples of that process alone, and another
    process takes its place. One that does not end is left behind: its process gets no more agents
    and is killed when the others in it have ended.

    Args:
        flags: Flags of agents.
        on_start: Callback with the number of every agent that starts.
        on_end: Callback with the number of an agent and how it ended.
        on_broken: Callback with the error after which no agent can run.
    """

    def __init__(
        self,
        flags: AgentConfig,
        on_start: Callable[[int], None],
        on_end: Callable[[int, AgentEnd], None],
        on_broken: Callable[[Exception], None],
    ) -> None:
        self._flags = flags
        self._on_start, self._on_end, self._on_broken = on_start, on_end, on_broken
        self._processes: list[_Process] = []
        self._waiting: deque[tuple[int, AgentTask]] = deque()
        self._starting: set[asyncio.Task[None]] = set()
        self._closed = False

    async def start(self) -> None:
        """Start all processes. Raises as a process that does not start."""
        count = self._flags.rl_agent_workers
        starts = (self._start_one() for _ in range(count))
        for failure in await asyncio.gather(*starts, return_exceptions=True):
            if failure is not None:
                raise failure

    async def _start_one(self) -> None:
        process = _Process()
        try:
            reader = await process.start(self._flags)
        except BaseException:
            process.kill()
            raise
        if self._closed:
            process.kill()
            return
        self._processes.append(process)
        process.follower = asyncio.create_task(self._follow(process, reader))
        process.follower.add_done_callback(self._report)
        self._fill()

    def submit(self, number: int, task: AgentTask) -> None:
        """Start an agent, now or when another ends."""
        self._waiting.append((number, task))
        self._fill()

    def give_up(self, number: int) -> None:
        """Leave an agent behind that does not end; ``on_end`` is not called for it."""
        for process in [p for p in self._processes if number in p.running]:
            process.running.discard(number)
            if not process.retiring:
                process.retiring = True
                self._replace()
            self._end_retired(process)

    def close(self) -> None:
        """Kill all processes. Idempotent."""
        self._closed = True
        self._waiting.clear()
        for process in self._processes:
            if process.follower is not None:
                process.follower.cancel()
            process.kill()
        self._processes = []

    def _fill(self) -> None:
        """Start agents that wait in the processes that have the fewest."""
        while self._waiting:
            most = self._flags.rl_agent_threads
            free = [p for p in self._processes if not p.retiring and len(p.running) < most]
            if not free:
                return
            number, task = self._waiting.popleft()
            min(free, key=lambda p: len(p.running)).send(number, task)
            self._on_start(number)

    async def _follow(self, process: _Process, reader: asyncio.StreamReader) -> None:
        """Pass the ends of a process's agents on, until the process ends."""
        try:
            while line := await reader.readline():
                number, end = read_end(line)
                if number in process.running:  # else it was given up
                    process.running.discard(number)
                    self._on_end(number, end)
                self._end_retired(process)
                self._fill()
            why = await process.ending()
        except (OSError, ValueError) as error:
            why = f"its process sent what is no message of agents: {error}"
        if process not in self._processes:
            return
        process.kill()
        self._processes.remove(process)
        logger.warning("%d agents are lost: %s", len(process.running), why)
        if not process.retiring:
            self._replace()
        for number in process.running:
            self._on_end(number, AgentEnd(lost=why))

    def _end_retired(self, process: _Process) -> None:
        if process.retiring and not process.running and process in self._processes:
            self._processes.remove(process)
            process.kill()

    def _replace(self) -> None:
        task = asyncio.create_task(self._start_one())
        self._starting.add(task)  # the loop itself holds no reference
        task.add_done_callback(self._starting.discard)
        task.add_done_callback(self._report)

    def _report(self, done: asyncio.Task[None]) -> None:
        """Pass the error of a task on, after which no agent can run."""
        if not done.cancelled() and (error := done.exception()) is not None:
            self._on_broken(error if isinstance(error, Exception) else RuntimeError(str(error)))
