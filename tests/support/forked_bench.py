"""Body of a fork that is a benchmark of tools/bench, whose ranks and commands are forks of it."""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from functools import partial
from pathlib import Path

import bench.jobs
import torch.multiprocessing as mp
from support.forked_torchrun import run_agent


def _torchrun(ranks: int, *target: str, quiet: bool = False) -> None:
    """As ``bench.jobs.torchrun``; what a quiet command says is in the log of this fork."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            if quiet:  # the result of a benchmark is its last line
                os.dup2(2, 1)
            run_agent(["--standalone", "--nproc-per-node", str(ranks), *target])
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    if status:
        sys.exit(f"{' '.join(target)}: ended with {os.waitstatus_to_exitcode(status)}")


def main() -> None:
    """Run the command of the folder that is the first argument."""
    command = json.loads((Path(sys.argv[1]) / "command.json").read_text())
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    os.chdir(command["cwd"])
    bench.jobs.torchrun = _torchrun
    mp.spawn = partial(mp.start_processes, start_method="fork")  # type: ignore[attr-defined]
    sys.argv = [command["script"], *command["flags"]]
    runpy.run_path(command["script"], run_name="__main__")
