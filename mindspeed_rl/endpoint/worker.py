"""A process of agents: ``python -m mindspeed_rl.endpoint.worker FD PARENT_PID FILE.py:FUNCTION``.

It reads tasks, one line of JSON each, runs every agent in a thread, and writes a line for each end.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from typing import IO, Any

from mindspeed_rl.core.agents import AGENT_FLAG
from mindspeed_rl.core.cores import release_process
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.user_files import load_from_file
from mindspeed_rl.endpoint.tasks import AgentTask
from mindspeed_rl.rewards.sandbox_launcher import die_with_parent

MAX_TRACE = 20_000
Agent = Callable[[AgentTask], object]


def load_agent(name: str) -> Agent:
    """Return the function of ``FILE.py:FUNCTION``.

    Raises:
        UsageError: There is no such file or function, or the file fails to import.
    """
    path, _, attribute = name.rpartition(":")
    return load_from_file(Path(path), attribute, f"{AGENT_FLAG} {name}")


def run_agent(agent: Agent, task: AgentTask) -> dict[str, Any]:
    """Run an agent to its end: the reward that it returned, or the traceback of its failure."""
    try:
        reward: object = agent(task)
        if inspect.iscoroutine(reward):
            reward = asyncio.run(reward)
        if reward is None:
            return {"reward": None}
        if not isinstance(reward, Real) or not math.isfinite(reward):
            raise TypeError(f"an agent must return a finite number or None, not {reward!r}")
        return {"reward": float(reward)}
    except BaseException:  # SystemExit of an agent's library must not end the others' process
        return {"raised": traceback.format_exc()[-MAX_TRACE:]}


def serve(agent: Agent, lines: IO[str], send: Callable[[Mapping[str, Any]], None]) -> None:
    """Run the agent of every task that comes, until no more can come."""

    def run(number: int, task: AgentTask) -> None:
        send({"number": number, **run_agent(agent, task)})

    for line in lines:
        fields = json.loads(line)
        number = fields.pop("number")
        threading.Thread(target=run, args=(number, AgentTask(**fields)), daemon=True).start()


def main(argv: list[str]) -> None:
    """Run the worker; see the first line of the module."""
    fd, parent_pid, name = int(argv[0]), int(argv[1]), argv[2]
    release_process(os.environ)
    if sys.platform == "linux":  # elsewhere it ends at the end of its connection
        die_with_parent()
        if os.getppid() != parent_pid:
            sys.exit("the parent ended before the process of agents had started")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    os.set_inheritable(fd, False)  # programs that an agent starts must not get it
    with socket.socket(fileno=fd) as connection, connection.makefile("r", encoding="utf-8") as file:
        lock = threading.Lock()

        def send(message: Mapping[str, Any]) -> None:
            with lock:
                connection.sendall(json.dumps(message).encode() + b"\n")

        try:
            agent = load_agent(name)
        except UsageError as error:
            send({"unusable": str(error)})
            return
        send({"ready": True})
        serve(agent, file, send)
    os.killpg(0, signal.SIGKILL)  # agents that still run, and what they started


if __name__ == "__main__":
    main(sys.argv[1:])
