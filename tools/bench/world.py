"""The ranks of the benchmark and what rank 0 prints."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench.cases import BuiltCase, available_bytes, build_case
from bench.measure import Options, run_case

# of what is free when the benchmark starts
_MEMORY_SHARE = 0.9
_LIMIT = timedelta(minutes=10)


def _built(args: argparse.Namespace) -> list[BuiltCase]:
    free = int(available_bytes() * _MEMORY_SHARE)
    return [build_case(name, args.ranks, args.num_experts, free, args.ways) for name in args.cases]


def spawn(args: argparse.Namespace) -> int:
    """Start the ranks on this machine and wait for them."""
    cases = _built(args)  # mistakes are told before anything starts
    with tempfile.TemporaryDirectory(prefix="reshard-bench-") as folder:
        mp.spawn(  # type: ignore[attr-defined,no-untyped-call]
            _spawned, args=(args, cases, folder), nprocs=args.ranks
        )
    return 0


def _spawned(rank: int, args: argparse.Namespace, cases: list[BuiltCase], folder: str) -> None:
    store = dist.FileStore(  # type: ignore[attr-defined]
        str(Path(folder) / "store"), args.ranks
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.ranks, timeout=_LIMIT)
    _run(args, cases, Path(folder))


def join_torchrun(args: argparse.Namespace) -> int:
    """Be one of torchrun's ranks; all of them on one machine, which share the weights' file.

    Raises:
        ValueError: another number of ranks than a case has layouts for.
    """
    dist.init_process_group("gloo", timeout=_LIMIT)
    args.ranks = dist.get_world_size()
    if args.ranks not in (4, 8):
        raise ValueError(f"torchrun started {args.ranks} ranks; allowed: 4 or 8")
    told: list[Any] = [None]
    with tempfile.TemporaryDirectory(prefix="reshard-bench-") as folder:
        if dist.get_rank() == 0:
            told = [(_built(args), folder)]
        dist.broadcast_object_list(told)
        cases, shared = told[0]
        _run(args, cases, Path(shared))
    return 0


def _run(args: argparse.Namespace, cases: Sequence[BuiltCase], folder: Path) -> None:
    torch.set_num_threads(1)
    options = Options(args.repeats, args.bucket_mb << 20, args.ways, folder, profile=args.profile)
    start_s, speaks = time.monotonic(), dist.get_rank() == 0

    def say(line: str) -> None:
        if speaks:
            print(f"[{time.monotonic() - start_s:5.0f} s] {line}", file=sys.stderr, flush=True)

    records = []
    for case in cases:
        try:
            records.append(run_case(case, options, say))
        except ImportError as error:  # before the first collective, so on all ranks
            say(f"{case.name}: left out: {error}")
            records.append({"case": case.name, "left_out": str(error)})
            continue
        gc.collect()
        if speaks:
            print("\n".join(table(records[-1])), flush=True)
    if speaks:
        print("RESULT " + json.dumps({"bench": "reshard", "cases": records}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def table(record: Mapping[str, Any]) -> list[str]:
    """The lines of one case."""
    raw = record["raw_bytes_per_s"]
    speeds = ", ".join(f"{name} {speed / 1e9:.2f}" for name, speed in raw.items())
    lines = [
        "",
        f"{record['title']}; {record['weights_bytes'] / 1e6:.0f} MB on {record['ranks']} ranks",
        f"bare collectives, GB/s received per rank: {speeds}",
        f"{'way':<13} {'best s':>7} {'median':>7} {'wire MB':>9} {'rank MB':>8} {'floor MB':>8} "
        f"{'extra MB':>8} {'of a2a':>7} {'of bare':>7} {'x direct':>8}",
    ]
    for name, way in record["strategies"].items():
        bare = way["share_of_raw_collectives"]
        lines.append(
            f"{name:<13} {way['best_s']:7.2f} {way['median_s']:7.2f} "
            f"{way['wire_bytes'] / 1e6:9.0f} {way['recv_bytes']['max'] / 1e6:8.0f} "
            f"{record['floor_bytes']['max'] / 1e6:8.0f} {way['peak_extra_bytes'] / 1e6:8.0f} "
            f"{way['share_of_raw_all_to_all']:7.0%} {'-' if bare is None else f'{bare:.0%}':>7} "
            f"{way['times_direct']:8.2f}"
        )
    for name, rows in record.get("profile", {}).items():
        lines.append(f"{name}, under the profiler, rank 0:")
        lines += [f"  {r['seconds']:7.3f} s {r['calls']:>8} x {r['function']}" for r in rows]
    return lines
