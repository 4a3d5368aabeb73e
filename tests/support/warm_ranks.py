"""A process that has imported what ranks need and forks the ranks of test worlds.

Importing torch, megatron-core and vLLM takes each rank longer than most tests. A line of standard
input is a JSON object with ``folder`` and ``environment`` of a rank (see ``support/spawn.py``) and
the module whose ``main`` is its ``body``; the answer is a line with its process id. When a rank
ends, its exit status is written to ``rank<RANK>.exit`` in the folder. When standard input ends,
what still runs is killed.

The forks share the hash seed of strings, and vLLM was imported before they had an environment of
their own: tests in tests/e2e that ask for new processes have ranks as those of a user.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

TRAINER_LIBRARIES = (
    "numpy", "safetensors.torch", "torch.distributed", "transformers",
    "megatron.core.distributed", "megatron.core.optimizer", "megatron.core.models.gpt",
    "megatron.core.pipeline_parallel",
)  # fmt: skip
_ENGINE_LIBRARIES = (
    "vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker", "vllm.v1.engine.llm_engine",
    "vllm.model_executor.models.qwen2", "vllm.model_executor.models.qwen3_moe",
    "vllm.model_executor.models.deepseek_v2", "vllm.entrypoints.launchers.cli_args",
    "vllm.model_executor.layers.quantization.online.base", "xgrammar",
)  # fmt: skip
# Other libraries of a run, and modules of this project that bring most of the others with them.
RUN_MODULES = (
    "scipy.stats", "pandas", "pyarrow", "matplotlib.backends.backend_agg",
    "torch.utils.tensorboard",
    "mindspeed_rl.launch.entry", "mindspeed_rl.launch.watchdog", "mindspeed_rl.replay.run",
    "mindspeed_rl.rl.build", "mindspeed_rl.selftest.loss", "mindspeed_rl.metrics.curves",
)  # fmt: skip
_CPU_MODULES = (
    "mindspeed_rl.platforms.cpu_install", "mindspeed_rl.engines.vllm.engine",
    "mindspeed_rl.engines.vllm.host_backend",
)  # fmt: skip
# A server of few worlds in which a fault is planted: hardly any of them has an engine, and modules
# of this project are imported after the fault.
FEW_WORLDS = "MINDSPEED_RL_TEST_FEW_WORLDS"
# An open file of the forks of a job, by which they are found: their environment stays that of the
# server in /proc, and libraries change their names.
MARKED_FILE = 1000
_POLL_S = 0.02


@dataclass
class Rank:
    """One forked rank; the part of :class:`subprocess.Popen` that is needed here."""

    pid: int
    exit_file: Path

    def poll(self) -> int | None:
        """The exit status, negative for a signal; ``None`` while it runs."""
        return self.returncode

    @property
    def returncode(self) -> int | None:
        """See :meth:`poll`."""
        return self._status if self.exit_file.exists() else None

    @cached_property
    def _status(self) -> int:
        return int(self.exit_file.read_text())

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Return when it has ended."""
        while self.poll() is None:
            time.sleep(_POLL_S)


class Server:
    """The forking process, started when the first rank is asked for.

    Args:
        arguments: of Python, which make it import what it should and call :func:`serve`.
        environment: beside that of this process.
    """

    def __init__(
        self,
        arguments: Sequence[str] = ("-m", "support.warm_ranks"),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._arguments, self._environment = arguments, dict(environment or {})

    @cached_property
    def _process(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
            | self._environment,
        )

    def start(self, folder: Path, environment: dict[str, str], body: str = "support.spawn") -> Rank:
        """Fork a rank. Worlds may be started by several threads at once."""
        task = {"folder": str(folder), "environment": environment, "body": body}
        with self._lock:
            stdin, stdout = self._pipes
            print(json.dumps(task), file=stdin, flush=True)
            pid = int(stdout.readline())
        return Rank(pid, folder / f"rank{environment['RANK']}.exit")

    @property
    def _pipes(self) -> tuple[IO[str], IO[str]]:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        return process.stdin, process.stdout


SERVER = Server()  # of this process


def become_rank(folder: Path, environment: dict[str, str]) -> None:
    """Body of a fork until the task itself: its own log, environment and path."""
    log = os.open(
        folder / f"rank{environment['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600
    )
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, number in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, number)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # what it found in the environment of its parent
    sys.path[:] = environment["PYTHONPATH"].split(os.pathsep)
    sys.argv[1:] = [str(folder)]


def _reap(running: dict[int, Path], flags: int = os.WNOHANG) -> None:
    """Write down the exit statuses of the ranks that ended."""
    while running:
        pid, status = os.waitpid(-1, flags)
        if not pid:
            return
        file = running.pop(pid)
        part = file.with_suffix(".part")
        part.write_text(str(os.waitstatus_to_exitcode(status)))
        part.replace(file)


def serve() -> dict[str, Any] | None:
    """Fork ranks until standard input ends; in a fork, its task."""
    running: dict[int, Path] = {}
    gc.freeze()  # forks neither look through what was imported nor copy its pages for that
    while True:
        ready, _, _ = select.select([sys.stdin.fileno()], [], [], _POLL_S)
        _reap(running)
        if not ready:
            continue
        line = sys.stdin.buffer.raw.readline()  # type: ignore[attr-defined]
        if not line:
            break
        task: dict[str, Any] = json.loads(line)
        folder = Path(task["folder"])
        pid = os.fork()
        if pid == 0:
            return task
        running[pid] = folder / f"rank{task['environment']['RANK']}.exit"
        print(pid, flush=True)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    _reap(running, flags=0)
    return None


def main() -> None:
    """Serve; a fork leaves through here as well, so that its exit handlers run."""
    from mindspeed_rl.core.process_end import end_process
    from mindspeed_rl.launch import bootstrap

    bootstrap.prepare_environment("cpu", os.environ)
    of_runs = _ENGINE_LIBRARIES + RUN_MODULES + _CPU_MODULES
    for name in TRAINER_LIBRARIES + (() if os.environ.get(FEW_WORLDS) else of_runs):
        importlib.import_module(name)
    task = serve()
    if task is not None:
        become_rank(Path(task["folder"]), task["environment"])
        importlib.import_module(task["body"]).main()
        end_process()


if __name__ == "__main__":
    main()
