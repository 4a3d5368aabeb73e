"""Times the switch between training and rollout on real engines, action by action.

    python tools/bench/switch.py                        # 2 ranks, 205 MB of bf16 weights, 2 minutes

ours        the product's state machine: one persistent host region per owner, storages resized
sequential  the same steps as in scripts: at every switch each tensor is copied to newly allocated
            host memory, one after another
floor       a plain copy of as many bytes as ours copies, into memory that is as warm or fresh

The three alternate in one run; numbers are medians over the cycles of the slowest rank. The
engine's weights are freed, too (--rollout-sleep all). The last line is RESULT and a JSON object.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import needs_environment  # noqa: F401
import torch
import torch.distributed as dist

from bench.jobs import parser_of, print_result, slowest, torchrun
from mindspeed_rl.colocation import scheduler, transition
from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.memory import MemoryOwner
from mindspeed_rl.core.tables import aligned
from mindspeed_rl.launch import bootstrap
from mindspeed_rl.planning.run_plan import plan_rl
from mindspeed_rl.platforms.host_pages import advise_large_pages
from mindspeed_rl.platforms.storages import as_bytes, storages_of
from mindspeed_rl.weights.sync import WeightSync

Seconds = dict[str, list[float]]
FLAGS = (
    "--platform cpu --bf16 --use-distributed-optimizer --train-iters 1 --lr 1e-4 "
    "--max-prompt-length 32 --rollout-max-response-length 32 --micro-batch-size 4 "
    "--rl-offload all --reshard-verify-interval 0 --reshard-bucket-mb 64 --vllm-max-num-seqs 8"
)


def race(args: argparse.Namespace) -> None:
    """Alternate the ways and print the results on rank 0. Collective: the world."""
    job = start(args)
    ours: Seconds = defaultdict(list)
    theirs: Seconds = defaultdict(list)
    phases, sharing, engine, sync = built = build(job)

    def to_rollout(version: int) -> None:
        phases.to_sync()
        with timed(ours["reshard"]):
            sync.run(engine, version)
        phases.to_rollout()

    floor: list[float] = []
    bytes_of = sizes(sharing, engine)
    source = torch.ones(min(64 << 20, bytes_of["copied"]), dtype=torch.uint8)
    kept = source.clone()
    for version in range(args.warm_cycles):  # checks weights, allocates host memory, packs
        to_rollout(version)
        phases.to_train()
    ours.clear()
    for cycle in range(args.cycles):
        dist.barrier()
        with timed(ours["total"]), timed_actions(ours):
            to_rollout(args.warm_cycles + cycle)
            phases.to_train()
        dist.barrier()
        with timed(theirs["total"]):
            sequential(built, cycle, theirs)
        dist.barrier()
        with timed(floor):
            plain_copy(bytes_of, source, kept)
        if dist.get_rank() == 0:
            print(f"cycle {cycle + 1}/{args.cycles}", file=sys.stderr, flush=True)
    report(args, bytes_of, ours, theirs, floor)


def start(args: argparse.Namespace, flags: str = "") -> Any:
    """Start the platform and the process group and make the plan, with more flags of a run."""
    world = bootstrap.World.from_environment()
    bootstrap.set_defaults("cpu", os.environ)
    bootstrap.quiet_libraries()
    platform = bootstrap.start("cpu", 30, world)
    argv = [
        *FLAGS.split(),
        *flags.split(),
        "--hf-checkpoint",
        args.model,
        "--prompt-data",
        __file__,
    ]
    argv += ["--output-dir", f"{args.model}/out", "--rollout-kv-cache-gb", str(args.kv_cache_gb)]
    config = parse(RLRunConfig, argv, "switch").config
    watchdog = SimpleNamespace(phase=lambda *_: nullcontext())
    from mindspeed_rl.launch.job import Job

    plan = plan_rl(config, world.size, files=False)  # the model has no tokenizer
    minutes = config.parallel.distributed_timeout_minutes
    return Job(config, plan, world, platform, cast(Any, watchdog), (), minutes)


Built = tuple[scheduler.DeviceScheduler, scheduler.ColocationPlan, Any, WeightSync]


def build(job: Any) -> Built:
    """Build the product's state machine in TRAIN, its trainer after one update, engine and sync."""
    from mindspeed_rl.algorithms.losses import supervised_loss
    from mindspeed_rl.building import engine as build_engine
    from mindspeed_rl.building import models as build_models
    from mindspeed_rl.building.models import Models
    from mindspeed_rl.core.types import TrainSample

    build_models.initialize_parallel(job)
    policy = build_models.build_engine(job, "policy", 1)
    samples = [TrainSample(i, torch.arange(5, 21), 8) for i in range(job.world.size)]
    batches = policy.prepare(build_models.batch_rules(job).pack_own(samples))
    num_tokens = 8 * len(samples)
    policy.forward_backward(batches, lambda inputs: supervised_loss(inputs, num_tokens))
    policy.step()  # creates the moments
    sharing = build_engine.share_memory(job, Models(policy))
    sharing.leave_all()
    engine = build_engine.build_rollout_engine(job)
    phases = scheduler.DeviceScheduler(engine, lambda _: nullcontext(), sharing)
    phases.to_train()
    return phases, sharing, engine, build_engine.build_weight_sync(job, policy)


def sizes(sharing: scheduler.ColocationPlan, engine: Any) -> dict[str, int]:
    """Return the bytes of one whole switch on this rank, in both directions."""
    owned = {owner.value: group.num_bytes() for owner, group in sharing.groups.items()}
    kept = owned[MemoryOwner.PARAMETERS] + owned[MemoryOwner.OPTIMIZER]
    return {
        **owned,
        "engine_weights": engine.weight_bytes,
        "kv_cache": engine.cache_bytes,
        "copied": 2 * kept + engine.weight_bytes,
    }


@contextmanager
def timed(into: list[float]) -> Iterator[None]:
    """Append the seconds of the block to a list."""
    begin = time.perf_counter()
    yield
    into.append(time.perf_counter() - begin)


@contextmanager
def timed_actions(into: Seconds) -> Iterator[None]:
    """Time every action of the state machine by name."""

    def clocked(action: transition.Action) -> transition.Action:
        def do() -> None:
            with timed(into[action.name]):
                action.do()

        return transition.Action(action.name, action.phase, do, action.undo)

    def perform(actions: Sequence[transition.Action], phase: Any) -> None:
        transition.perform([clocked(action) for action in actions], phase)

    with mock.patch.object(scheduler, "perform", perform):
        yield


def sequential(built: Built, cycle: int, into: Seconds) -> None:
    """Switch with a script's steps, tensor by tensor; the state machine does not notice.

    gradients away, optimizer away | empty engine weights, reshard | parameters away, cache | cache
    away, engine weights away | parameters back, optimizer back, gradients back.
    """
    _, sharing, engine, sync = built
    groups = sharing.groups
    step: Callable[[str], Any] = lambda name: timed(into[name])  # noqa: E731
    with step("offload grad_buffers"):
        gradients = away(groups[MemoryOwner.GRAD_BUFFERS], keep=False)
    with step("offload optimizer"):
        optimizer = away(groups[MemoryOwner.OPTIMIZER])
    with step("engine weights"):
        engine.wake_weights()
    with step("reshard"):
        sync.run(engine, 10**6 + cycle)
    with step("offload parameters"):
        parameters = away(groups[MemoryOwner.PARAMETERS])
    with step("cache"):
        engine.wake_cache()
    with step("free cache"):
        engine.free_cache()
    with step("free engine weights"):
        engine.free_weights()
    with step("onload parameters"):
        back(parameters)
    with step("onload optimizer"):
        back(optimizer)
    with step("onload grad_buffers"):
        back(gradients)


Away = list[tuple[torch.UntypedStorage, int, torch.Tensor | None]]


def away(group: Any, keep: bool = True) -> Away:
    """Free each storage; if it is kept, copy it to newly allocated host memory before."""
    found: Away = []
    for storage in storages_of(group._find()):
        host = as_bytes(storage).clone() if keep else None
        found.append((storage, storage.nbytes(), host))
        storage.resize_(0)
    return found


def back(stored: Away) -> None:
    """Restore each storage from its host memory, which is then freed."""
    for storage, size, host in stored:
        storage.resize_(size)
        if host is not None:  # the update zeroes gradients itself, as in ours
            as_bytes(storage).copy_(host)


def plain_copy(bytes_of: dict[str, int], source: torch.Tensor, kept: torch.Tensor) -> None:
    """Copy as many bytes as a switch, in pieces from warm memory, to equally warm or fresh memory.

    Bytes to the host always go to the same memory. Bytes that come back and the engine's weights go
    to newly allocated large pages, which ours requests, too.
    """
    to_host = (bytes_of["copied"] - bytes_of["engine_weights"]) // 2
    for left, fresh in ((to_host, False), (bytes_of["copied"] - to_host, True)):
        while left > 0:
            size, target = min(len(source), left), kept
            if fresh:
                target = torch.empty(size, dtype=torch.uint8)
                advise_large_pages(target.data_ptr(), size)
            target[:size].copy_(source[:size])
            left -= size


def report(
    args: argparse.Namespace,
    bytes_of: dict[str, int],
    ours: Seconds,
    theirs: Seconds,
    floor: list[float],
) -> None:
    """Print the medians of the slowest rank. Collective: the world."""
    our_s, their_s = (
        slowest({name: statistics.median(taken) for name, taken in way.items()})
        for way in (ours, theirs)
    )
    floor_s = slowest({"floor": statistics.median(floor)})["floor"]
    if dist.get_rank():
        return
    print("MB on a rank  " + "  ".join(f"{k} {v / 1e6:.0f}" for k, v in bytes_of.items()))
    rows = [["action", "ours s", "sequential s"]]
    for name, seconds in our_s.items():
        other = f"{their_s[name]:.4f}" if name in their_s else ""
        rows.append([name, f"{seconds:.4f}", other])
    print("\n".join(aligned(rows)))
    print(
        f"sequential / ours: {their_s['total'] / our_s['total']:.2f}; floor: a plain copy of "
        f"{bytes_of['copied'] / 1e6:.0f} MB takes {floor_s:.4f} s, ours / floor "
        f"{our_s['total'] / floor_s:.2f}"
    )
    print_result(
        "switch", ranks=dist.get_world_size(), cycles=args.cycles, bytes=bytes_of,
        ours_s=our_s, sequential_s=their_s, floor_s=floor_s,
    )  # fmt: skip


def command_line() -> argparse.Namespace:
    """Read the flags; ``--model`` is given to the ranks that the benchmark starts."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="data-parallel ranks (2)")
    parser.add_argument("--num-layers", type=int, default=8, help="layers of 12.8 M weights (8)")
    parser.add_argument("--hidden-size", type=int, default=1024, help="a multiple of 64 (1024)")
    parser.add_argument("--warm-cycles", type=int, default=3, help="untimed switches before (3)")
    parser.add_argument("--cycles", type=int, default=7, help="timed switches of each way (7)")
    parser.add_argument("--kv-cache-gb", type=float, default=0.25, help="GiB per rank (0.25)")
    parser.add_argument("--model", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.hidden_size < 64 or args.hidden_size % 64:
        parser.error(f"--hidden-size {args.hidden_size}: must be a multiple of 64")
    for name in ("ranks", "num_layers", "cycles", "warm_cycles"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    return args


def launch(script: str, args: argparse.Namespace, folder: str = "") -> None:
    """Write a model of the size of the flags, start the ranks of a benchmark and wait for them.

    Args:
        script: File of the benchmark, which the ranks run with ``--model``.
        args: Its flags: ranks, hidden size and layers.
        folder: Where a folder is made for the time of the run; by default that of the system.
    """
    from make_tiny_model import write_tiny_model

    prefix = f"{Path(script).stem}-bench-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder or None) as made:
        print("writing a model with random weights", file=sys.stderr, flush=True)
        model = write_tiny_model(
            Path(made) / "model",
            hidden_size=args.hidden_size,
            num_layers=args.num_layers,
            num_heads=args.hidden_size // 64,
            num_kv_heads=args.hidden_size // 64,
            ffn=11 * args.hidden_size // 4,
        )
        torchrun(args.ranks, script, *sys.argv[1:], "--model", str(model))


def main() -> None:
    """Start the ranks, or run as one of them."""
    args = command_line()
    if args.model:
        race(args)
    else:
        launch(__file__, args)


if __name__ == "__main__":
    main()
