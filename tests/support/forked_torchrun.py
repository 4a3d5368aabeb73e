"""Body of a fork that is torchrun's agent, and whose ranks are forks of it.

Neither imports what its parent has, and apart from that they are as torchrun starts them: ranks are
children of the agent in sessions of their own, with the environment, arguments and streams that it
gives them, and it waits for them and ends them in its own way.
"""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.command_rank import prepare_imported
from support.warm_ranks import MARKED_FILE

from mindspeed_rl.launch import bootstrap

_POLL_S = 0.02


class ForkedRank:
    """What torchrun uses of :class:`subprocess.Popen`, of a fork that runs a command of Python.

    Args:
        args: interpreter, its options, a script or ``-m`` and a module, and their arguments.
        env: environment of the rank.
        stdout, stderr: where its streams go; by default where those of the agent go.
        start_new_session: torchrun asks for that.
    """

    def __init__(
        self,
        args: Sequence[str],
        env: dict[str, str],
        stdout: Any,
        stderr: Any,
        start_new_session: bool,
    ) -> None:
        assert start_new_session
        self.args = args
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become(args, env, (stdout, stderr))

    def poll(self) -> int | None:
        """The exit status, negative for a signal; ``None`` while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The exit status, when it has ended."""
        end = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(_POLL_S)
        return status


def _become(args: Sequence[str], env: dict[str, str], streams: Sequence[Any]) -> None:
    """Run the command and end this process, whose frames above are those of the agent."""
    status = 1
    try:
        os.setsid()
        weakref.finalize._registry.clear()  # what its parents are to remove when they end
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, stream in enumerate(streams, start=1):
            if stream is not None:
                os.dup2(stream.fileno(), number)
        os.closerange(3, MARKED_FILE)
        os.closerange(MARKED_FILE + 1, os.sysconf("SC_OPEN_MAX"))
        os.environ.clear()
        os.environ.update(env)
        sys.stdout = os.fdopen(os.dup(1), "w", buffering=1, errors="backslashreplace")
        sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
        bootstrap.prepare_environment = prepare_imported
        assert args[1] == "-u", args
        _run(args[2:])
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        _leave(status)


def _run(words: Sequence[str]) -> None:
    """As Python itself would run a script, or ``-m`` and a module."""
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")


def _leave(status: int) -> None:
    """End as Python does: threads that must end, exit handlers, streams."""
    import atexit
    import threading

    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def run_agent(arguments: Sequence[str]) -> None:
    """Be torchrun's agent in this fork; returns when its ranks have ended well."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess_handler.Popen = ForkedRank  # type: ignore[assignment,misc]
    run.main(arguments)


def main() -> None:
    """Run torchrun's agent with the arguments of the folder that is the first argument."""
    file = Path(sys.argv[1]) / f"agent{os.environ.pop('RANK')}.json"
    command = json.loads(file.read_text())
    for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    os.setsid()
    mark = os.open(file, os.O_RDONLY)  # its path has the marker of the job
    os.dup2(mark, MARKED_FILE)
    os.close(mark)
    faulthandler.enable()
    os.chdir(command["cwd"])
    run_agent(command["arguments"])
