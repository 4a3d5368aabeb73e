"""Times what lies between the last micro-batch and new weights in the engines, and who is busy.

    python tools/bench/handover.py             # 8 ranks, 103 M weights in bf16, about 3 minutes

step    the optimizer's arithmetic on the rank's shards, without the gather
gather  the other ranks' shards of the parameters, by the distributed optimizer
sync    the weight update into the engines, with a sampled proof

For each, the mean over the cycles: seconds until the last rank has ended, processor seconds of all
ranks together, and those that the machine's cores were idle. What step and gather leave to others
is all that the sync could use under them: the bound is what would be hidden if it were idle (other
programs may have used it) and if the phases never waited for each other. The last line is RESULT
and a JSON object.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import needs_environment  # noqa: F401
import torch
import torch.distributed as dist

from bench.jobs import parser_of, print_result
from bench.switch import launch, start
from mindspeed_rl.core.tables import aligned

PHASES = ("step", "gather", "sync")
LAYOUT = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"


class BusyClock:
    """Sums by phase: seconds, processor seconds of this process, idle seconds of the machine."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])

    @contextmanager
    def over(self, phase: str) -> Iterator[None]:
        """Add what the block takes until all ranks have ended it. Collective: the world."""
        dist.barrier()
        before = self._now()
        yield
        dist.barrier()
        for i, (now, then) in enumerate(zip(self._now(), before, strict=True)):
            self.sums[phase][i] += now - then

    def _now(self) -> tuple[float, float, float]:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        idle = (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), time.process_time(), idle


def measure(args: argparse.Namespace) -> None:
    """Run cycles of update and sync, and print the table on rank 0. Collective: the world."""
    from mindspeed_rl.algorithms.losses import supervised_loss
    from mindspeed_rl.building import engine as build_engine
    from mindspeed_rl.building import models as build_models
    from mindspeed_rl.core.types import TrainSample

    job = start(args, LAYOUT)
    build_models.initialize_parallel(job)
    policy = build_models.build_engine(job, "policy", args.cycles + 1)
    engine = build_engine.build_rollout_engine(job)
    sync = build_engine.build_weight_sync(job, policy)
    sync.run(engine, 0)  # compares plans, and proves all weights
    samples = [TrainSample(i, torch.arange(5, 21), 8) for i in range(job.plan.parallel.dp)]
    batches = policy.prepare(build_models.batch_rules(job).pack_own(samples))
    clock = BusyClock()
    for cycle in range(args.cycles + 1):
        if cycle == 1:
            clock.sums.clear()  # the first update makes the moments
        policy.forward_backward(batches, lambda inputs: supervised_loss(inputs, 8 * len(samples)))
        policy.gradient_norm()
        step_and_gather(policy, clock)
        with clock.over("sync"):
            sync.run(engine, cycle + 1)
        if dist.get_rank() == 0:
            print(f"cycle {cycle}/{args.cycles}", file=sys.stderr, flush=True)
    report(args, clock, policy)


def step_and_gather(policy: Any, clock: BusyClock) -> None:
    """Make an optimizer step whose gather begins when all ranks have ended their arithmetic."""
    from megatron.core.distributed import DistributedDataParallel

    gather = DistributedDataParallel.start_param_sync
    started: list[Any] = []

    def later(self: Any, *args: Any, **kwargs: Any) -> None:
        started.append((self, args, kwargs))

    patched = mock.patch.object(DistributedDataParallel, "start_param_sync", later)
    with patched, clock.over("step"):
        policy.step()
    with clock.over("gather"):
        for model, arguments, options in started:
            gather(model, *arguments, **options)


def report(args: argparse.Namespace, clock: BusyClock, policy: Any) -> None:
    """Print seconds, processor seconds, and the bound of any overlap. Collective: the world."""
    own = torch.tensor([clock.sums[phase] for phase in PHASES]).T / args.cycles
    busy = own[1].clone()
    dist.all_reduce(busy)
    weights = torch.tensor(sum(p.numel() for p in policy.named_parameters().values()))
    dist.all_reduce(weights)
    if dist.get_rank():
        return
    cores = len(os.sched_getaffinity(0))
    seconds, processor, idle = (
        dict(zip(PHASES, values.tolist(), strict=True)) for values in (own[0], busy, own[2])
    )
    rows = [["phase", "seconds", f"x {cores} cores", "of our ranks", "idle"]]
    for phase in PHASES:
        sizes = (seconds[phase], cores * seconds[phase], processor[phase], idle[phase])
        rows.append([phase, *(f"{size:.3f}" for size in sizes)])
    print("\n".join(aligned(rows)))
    # The sync needs its processor seconds wherever it runs.
    left = sum(max(0.0, cores * seconds[p] - processor[p]) for p in ("step", "gather"))
    hidden = seconds["sync"] * min(1.0, left / processor["sync"])
    print(
        f"{dist.get_world_size()} ranks, {int(weights) / policy.layout.parallel.dp / 1e6:.0f} M "
        f"weights; at most {hidden:.3f} s of the sync ({hidden / seconds['sync']:.0%}) could hide "
        "in what step and gather leave of the cores"
    )
    print_result(
        "handover", ranks=dist.get_world_size(), cores=cores, cycles=args.cycles,
        seconds=seconds, processor_s=processor, idle_s=idle, hidden_s=hidden,
    )  # fmt: skip


def command_line() -> argparse.Namespace:
    """Read the flags; ``--model`` is given to the ranks that the benchmark starts."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=8, help="ranks, a multiple of 4 (8)")
    parser.add_argument("--num-layers", type=int, default=8, help="layers, an even number (8)")
    parser.add_argument("--hidden-size", type=int, default=1024, help="a multiple of 128 (1024)")
    parser.add_argument("--cycles", type=int, default=5, help="timed cycles, after one more (5)")
    parser.add_argument("--kv-cache-gb", type=float, default=0.03, help="GiB per rank (0.03)")
    parser.add_argument("--model", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name, divisor in (("ranks", 4), ("num_layers", 2), ("hidden_size", 128), ("cycles", 1)):
        value = getattr(args, name)
        if value < divisor or value % divisor:
            parser.error(f"--{name.replace('_', '-')} {value}: must be a multiple of {divisor}")
    return args


def main() -> None:
    """Start the ranks, or run as one of them."""
    args = command_line()
    if args.model:
        measure(args)
    else:
        launch(__file__, args)


if __name__ == "__main__":
    main()
