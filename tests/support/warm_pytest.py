"""Runs pytest in forks of a process that has imported the heavy libraries already.

Importing torch and megatron-core takes longer than most tests. A line of standard input is a JSON
object with ``folder`` (working directory; its ``tests`` and itself come first on the path),
``arguments`` of pytest, ``log`` (a file for the output), ``timeout_s`` and ``environment``, which
may name a fault (``tests/faults``); the answer is a line with pytest's exit status, or ``hangs``.
Nothing of mindspeed_rl or of the tests is imported here.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path

LIBRARIES = (
    "pytest", "hypothesis", "numpy", "safetensors.torch", "torch.distributed", "transformers",
    "megatron.core.distributed", "megatron.core.optimizer", "megatron.core.models.gpt",
    "megatron.core.pipeline_parallel",
)  # fmt: skip


def run(folder: Path, arguments: list[str], log: Path, environment: dict[str, str]) -> int:
    """Body of a fork."""
    os.setsid()  # what a test starts ends with it
    os.chdir(folder)
    # processes that the test starts plant the same fault
    path = [str(folder / "tests" / "faults" / "bootstrap"), str(folder)]
    os.environ.update(environment, PYTHONPATH=os.pathsep.join(path))
    sys.path[:] = [*path, str(folder / "tests"), *sys.path]
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    import pytest
    from faults.planting import plant_from_environment

    plant_from_environment()
    return int(pytest.main(arguments))


def wait(pid: int, timeout_s: float) -> str:
    """The exit status of a fork; one that hangs is killed with all that it started."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return str(os.waitstatus_to_exitcode(status))
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hangs"


def main() -> None:
    """Serve until standard input ends."""
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).parent]
    for name in LIBRARIES:
        importlib.import_module(name)
    for line in sys.stdin:
        task = json.loads(line)
        pid = os.fork()
        if pid == 0:
            status = 3  # pytest's own number for an internal error
            try:
                status = run(
                    Path(task["folder"]), task["arguments"], Path(task["log"]), task["environment"]
                )
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        print(wait(pid, task["timeout_s"]), flush=True)


if __name__ == "__main__":
    main()
