"""Runs a function on N gloo ranks, each in a process of its own, under a hard time limit.

Ranks are forks of a process that has imported the heavy libraries (``support/warm_ranks.py``). One
call is one world with one parallel layout: megatron-core cannot initialise twice in a process, so a
rank function should make all checks of its layout. Ranks meet in a file, so no port is used.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from support.jobs import free_port
from support.warm_ranks import SERVER, Rank, Server

# How long the peers of a failed rank may take to fail by themselves before they are killed.
GRACE_S = 5.0
# A rank that is over its limit dumps its stacks and exits; the parent then waits this long.
KILL_MARGIN_S = 10.0
LOG_TAIL_CHARS = 4000


class RankError(AssertionError):
    """A rank raised, died or hung. ``returncodes`` holds every rank's exit status."""

    def __init__(self, message: str, returncodes: Sequence[int | None]) -> None:
        super().__init__(message)
        self.returncodes = tuple(returncodes)


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *,
    work_dir: Path,
    args: Sequence[Any] = (),
    timeout_s: float = 240.0,
    server: Server | None = None,
) -> list[Any]:
    """Call ``function(world, *args)`` on every rank and return the results in rank order.

    Before the call the environment is prepared as by an entry of mindspeed_rl and the default gloo
    group exists; after it all ranks meet in a barrier.

    Args:
        function: defined at the top level of an importable module; its first argument is a
            :class:`mindspeed_rl.launch.bootstrap.World`.
        num_ranks: size of the world.
        work_dir: where a new folder with logs and results is made; ``tmp_path``.
        args: further arguments; must pickle.
        timeout_s: limit of each rank, start included. A rank that is over it dumps all stacks.
        server: whose forks the ranks are, where they need other libraries.

    Raises:
        RankError: with the traceback or the end of the log of every rank, the first failure first.
    """
    folder = Path(work_dir) / f"ranks-{uuid.uuid4().hex[:8]}"
    folder.mkdir(parents=True)
    task = (function.__module__, function.__qualname__, timeout_s)
    (folder / "task.pkl").write_bytes(pickle.dumps(task))
    # a file of their own: reading them may import torch, before which the environment must be set
    (folder / "args.pkl").write_bytes(pickle.dumps(tuple(args)))
    processes = [_start(folder, r, num_ranks, server or SERVER) for r in range(num_ranks)]
    end_ranks(function.__name__, folder, processes, timeout_s)
    return [pickle.loads((folder / f"rank{r}.result").read_bytes()) for r in range(num_ranks)]


def run_command(
    module: str,
    flags: Sequence[str],
    num_ranks: int,
    *,
    cwd: Path,
    timeout_s: float = 240.0,
) -> str:
    """Run ``python -m module flags`` on every rank; what rank 0 printed.

    Rank 0 holds the store: that of torchrun's agent is the difference to a start by torchrun.

    Args:
        module: an entry.
        flags: of the entry.
        num_ranks: size of the world.
        cwd: of every rank; a new folder with logs is made in it.
        timeout_s: limit of each rank, start included.

    Raises:
        RankError: as :func:`run_ranks`; an exit status other than 0 is a failure.
    """
    folder = cwd / f"ranks-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    command = {"module": module, "flags": list(flags), "cwd": str(cwd), "timeout_s": timeout_s}
    (folder / "command.json").write_text(json.dumps(command))
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        _start(folder, rank, num_ranks, SERVER, "support.command_rank", store)
        for rank in range(num_ranks)
    ]
    end_ranks(module, folder, processes, timeout_s)
    return (folder / "rank0.log").read_text(errors="replace")


def _start(
    folder: Path,
    rank: int,
    world: int,
    server: Server = SERVER,
    body: str = "support.spawn",
    more: Mapping[str, str] | None = None,
) -> Rank:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        **(more or {}),
    }
    return server.start(folder, environment, body)


def end_ranks(
    name: str,
    folder: Path,
    processes: Sequence[Rank | subprocess.Popen[bytes]],
    timeout_s: float,
) -> None:
    """Wait for all ranks and leave none; ``RankError`` when one failed."""
    try:
        order = _wait(processes, timeout_s + KILL_MARGIN_S)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    if order:
        # several may end between two looks: the one without an exception, or the earliest, is first
        order.sort(key=lambda rank: _failed_at_ns(folder, rank))
        codes = [process.returncode for process in processes]
        ranks = [*order, *(r for r in range(len(processes)) if r not in order)]
        story = "\n".join(_story(folder, rank, codes[rank]) for rank in ranks)
        raise RankError(f"{name} failed on rank {order[0]}\n{story}", codes)


def _wait(processes: Sequence[Rank | subprocess.Popen[bytes]], limit_s: float) -> list[int]:
    """Wait for all ranks; the ranks that failed by themselves, in the order in which they did."""
    deadline = time.monotonic() + limit_s
    failed: list[int] = []
    while any(process.poll() is None for process in processes):
        for rank, process in enumerate(processes):
            if process.poll() and rank not in failed:
                if not failed:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                failed.append(rank)
        if time.monotonic() > deadline:
            return failed or [r for r, process in enumerate(processes) if process.poll() is None]
        time.sleep(0.02)
    late = [r for r, process in enumerate(processes) if process.returncode and r not in failed]
    return failed + late


def _failed_at_ns(folder: Path, rank: int) -> int:
    """When a rank wrote its traceback; 0 when it could not."""
    error = folder / f"rank{rank}.error"
    return error.stat().st_mtime_ns if error.is_file() else 0


def _story(folder: Path, rank: int, code: int | None) -> str:
    """What is known about one rank."""
    error, log = folder / f"rank{rank}.error", folder / f"rank{rank}.log"
    end = f"exit status {code}"
    if code is not None and code < 0:
        end = f"ended by {signal.Signals(-code).name}"
    text = error.read_text() if error.is_file() else ""
    tail = log.read_text(errors="replace")[-LOG_TAIL_CHARS:]
    return f"--- rank {rank}: {end}\n{text}{tail}"


def _run_task(folder: Path) -> None:
    """Body of a rank."""
    module, name, timeout_s = pickle.loads((folder / "task.pkl").read_bytes())
    faulthandler.enable()
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    from mindspeed_rl.launch import bootstrap

    bootstrap.set_defaults("cpu", os.environ)
    world = bootstrap.World.from_environment()
    import importlib
    from datetime import timedelta

    import torch.distributed as dist
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    store = FileStore(str(folder / "store"), world.size)
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group(
        "gloo", store=store, rank=world.rank, world_size=world.size, timeout=limit
    )
    function = getattr(importlib.import_module(module), name)
    args = pickle.loads((folder / "args.pkl").read_bytes())
    result = pickle.dumps(function(world, *args))
    (folder / f"rank{world.rank}.result").write_bytes(result)
    dist.barrier()
    if "vllm" not in sys.modules:  # else its own exit handler destroys the groups
        dist.destroy_process_group()


def run_body(body: Callable[[Path], None]) -> None:
    """Call the body of a rank with its folder, the first argument; an error goes into that."""
    folder = Path(sys.argv[1])
    try:
        body(folder)
    except BaseException:
        (folder / f"rank{os.environ['RANK']}.error").write_text(traceback.format_exc())
        with contextlib.suppress(ValueError):  # a closed stream has nothing to flush
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(1)  # peers may be inside a collective that this rank will never join


def main() -> None:
    """Body of a rank that was asked for by :func:`run_ranks`."""
    run_body(_run_task)
