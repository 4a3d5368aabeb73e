"""Races the ways to reshard on gloo ranks of this machine: direct, stream, gather, two-stage.

    python tools/bench/reshard.py                       # two cases on 4 ranks, under 3 minutes
    python tools/bench/reshard.py --cases all --ranks 8
    python tools/bench/reshard.py --cases qwen3-30b-a3b --num-experts 128
    torchrun --nproc-per-node 4 tools/bench/reshard.py  # the same with ranks of torchrun

direct     the product: every rank receives only what its engine lacks, point to point
direct-all-to-all  the same by one all-to-all-v per round, everything packed
stream     the product: whole HF tensors in rounds on every rank, cut into the engine
gather     the peers' plain way (verl): pipeline broadcast, tensor and expert all-gathers
two-stage  the CANN recipe: dense tensors as gather, experts by all-to-all-v
megatron-core  megatron.core.resharding, which knows trainer layouts only: its case is from one to
           another (left out where megatron-core is not installed)

The ways alternate in one run. After each the engine weights are compared, bit by bit, with slices
of the HF tensors, and the baselines' bytes with their closed forms; a difference ends the run.
Columns: seconds (best and median); bytes received by all ranks over the wire; the same by the rank
that receives most, and its floor (what its engine lacks); growth of the peak resident memory while
a way is built and run first, of the rank where it is largest; share of the bandwidth of a bare
all-to-all of the same run; for the baselines, share of the bandwidth of the bare collectives they
use; time as a multiple of direct's. Shares and multiples are those of medians. The last line is
RESULT and a JSON object.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

if __name__ in ("__main__", "__mp_main__"):
    # the folder of the package `bench` instead of that of this file
    sys.path[0] = str(Path(__file__).resolve().parents[1])


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    from bench.cases import CASES, WAYS

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, choices=(4, 8), default=4, help="gloo ranks (4)")
    parser.add_argument(
        "--cases",
        default="qwen2.5-7b,qwen3-30b-a3b",
        help="comma-separated models, two layers of real shape each, or all "
        f"(qwen2.5-7b,qwen3-30b-a3b); known: {', '.join(CASES)}",
    )
    parser.add_argument(
        "--num-experts",
        type=int,
        default=0,
        help="experts per layer of models that have them; the default keeps the run short, and "
        "halves until the case fits into memory (the title says what ran)",
    )
    parser.add_argument(
        "--ways",
        default=",".join(WAYS),
        help="comma-separated, direct among them (%(default)s): each keeps its buffers, so fewer "
        "need less memory",
    )
    parser.add_argument("--repeats", type=int, default=2, help="timed runs of each way (2)")
    parser.add_argument(
        "--bucket-mb", type=int, default=128, help="bound of the staging of a round, MiB (128)"
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="run each way once more under Python's profiler and print where rank 0's time goes",
    )
    args = parser.parse_args(argv)
    args.cases = list(CASES) if args.cases == "all" else [n for n in args.cases.split(",") if n]
    if not args.cases:
        parser.error(f"--cases: nothing to run; known: all, {', '.join(CASES)}")
    args.ways = [name for name in args.ways.split(",") if name]
    if "direct" not in args.ways or not set(args.ways) <= set(WAYS):
        parser.error(f"--ways {','.join(args.ways)}: direct and some of {', '.join(WAYS[1:])}")
    if unknown := [name for name in args.cases if name not in CASES]:
        parser.error(f"--cases {','.join(unknown)}: unknown; known: all, {', '.join(CASES)}")
    for flag in ("repeats", "bucket_mb"):
        if getattr(args, flag) < 1:
            parser.error(f"--{flag.replace('_', '-')} {getattr(args, flag)}: must be at least 1")
    if args.num_experts < 0:
        parser.error(f"--num-experts {args.num_experts}: must be positive, or 0 for the default")
    return args


def main() -> int:
    """Spawn the ranks, or be one of torchrun's."""
    args = parse()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from bench.world import join_torchrun, spawn

    try:
        return join_torchrun(args) if "RANK" in os.environ else spawn(args)
    except ValueError as error:
        print(f"reshard.py: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
