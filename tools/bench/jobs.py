"""What the benchmarks share: their command lines, their ranks, their results."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mindspeed_rl.parallel.small_collectives import gather_objects

ROOT = Path(__file__).resolve().parents[2]
_LIMIT = timedelta(minutes=10)


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows the docstring of a benchmark as it is."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def spawn(run: Callable[[argparse.Namespace], None], args: argparse.Namespace, ranks: int) -> None:
    """Run a function on gloo ranks of this machine, one thread each, and wait for them."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        mp.spawn(_run_rank, (run, args, ranks, folder), ranks)  # type: ignore[attr-defined,no-untyped-call]


def _run_rank(
    rank: int,
    run: Callable[[argparse.Namespace], None],
    args: argparse.Namespace,
    ranks: int,
    folder: str,
) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", store, rank=rank, world_size=ranks, timeout=_LIMIT)
    run(args)
    dist.destroy_process_group()


def torchrun(ranks: int, *target: str, quiet: bool = False) -> None:
    """Run a command on all ranks; if it fails, end, and show what it said if it was ``quiet``."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", str(ranks), *target]
    done = subprocess.run(command, env=environment, check=False, text=True, capture_output=quiet)
    if done.returncode:
        said = f"{done.stdout[-4000:]}{done.stderr[-4000:]}" if quiet else ""
        sys.exit(f"{said}\n{' '.join(command)}\nended with {done.returncode}")


def slowest(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the most seconds of any rank, by name. Collective: the world."""
    ranks = gather_objects(seconds)
    return {name: max(of_rank[name] for of_rank in ranks) for name in seconds}


def print_result(bench: str, **record: Any) -> None:
    """Print the last line of a benchmark, for programs that read it."""
    print("RESULT " + json.dumps({"bench": bench, **record}), flush=True)
