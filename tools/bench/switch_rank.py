"""One rank of the benchmark of the switch."""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist

from mindspeed_rl import bootstrap
from mindspeed_rl.arguments import parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.config.validate import check_rl
from mindspeed_rl.memory.owners import Owner
from mindspeed_rl.observability.memory_ledger import Slope
from mindspeed_rl.offload.storages import as_bytes, storages_of
from mindspeed_rl.phases import machine, transition
from mindspeed_rl.platforms.host_pages import advise_large_pages

Seconds = dict[str, list[float]]
COMPARED_CYCLES = 7
# torch's flight recorder keeps this many collectives (about 1 KiB each) before it reuses memory.
RECORDED_COLLECTIVES = 2000
FLAGS = (
    "--platform cpu --bf16 --use-distributed-optimizer --train-iters 1 --lr 1e-4 "
    "--max-prompt-length 32 --rollout-max-response-length 32 --micro-batch-size 4 "
    "--rl-offload all --reshard-verify-interval 0 --reshard-bucket-mb 64 --vllm-max-num-seqs 8"
)


def race(args: argparse.Namespace) -> dict[str, Any] | None:
    """Alternate the ways; the record, on rank 0. Collective: the world."""
    job = start(args)
    phases, sharing, engine = build(job)
    ours: Seconds = defaultdict(list)
    theirs: Seconds = defaultdict(list)
    plain: Seconds = defaultdict(list)
    bytes_of = sizes(sharing, engine)
    for version in range(args.warm_cycles):  # proves the weights, allocates host memory, packs
        phases.to_rollout(version)
        phases.to_train()
    for _ in range(RECORDED_COLLECTIVES):
        dist.barrier()
    # of fixed size: what the bench keeps itself must not look like growth
    resident, seconds = (array("d", bytes(8 * args.cycles)) for _ in range(2))
    for cycle in range(args.cycles):
        dist.barrier()
        detailed = cycle < COMPARED_CYCLES
        begin = time.perf_counter()
        with timed_actions(ours) if detailed else nullcontext():
            phases.to_rollout(args.warm_cycles + cycle)
            phases.to_train()
        seconds[cycle] = time.perf_counter() - begin
        resident[cycle] = job.platform.memory().used_bytes
        if not detailed:
            continue  # further cycles are for memory and for the trend of ours
        ours["total"].append(seconds[cycle])
        dist.barrier()
        with timed(theirs["total"]):
            sequential(sharing, phases, engine, cycle, theirs)
        for name, large_pages in (("ordinary", False), ("large", True)):
            dist.barrier()
            with timed(plain[f"{name} pages"]):
                plain_copy(bytes_of, large_pages)
        if dist.get_rank() == 0:
            print(f"cycle {cycle + 1}/{args.cycles}", file=sys.stderr, flush=True)
    return report(args, bytes_of, [ours, theirs, plain], (resident, seconds))


def start(args: argparse.Namespace) -> Any:
    """Platform, process group, plan."""
    world = bootstrap.World.from_environment()
    bootstrap.set_defaults("cpu", os.environ)
    bootstrap.quiet_libraries()
    platform = bootstrap.start("cpu", 30, world)
    argv = [*FLAGS.split(), "--hf-checkpoint", args.model, "--prompt-data", __file__]
    argv += ["--output-dir", f"{args.model}/out", "--rollout-kv-cache-gb", str(args.kv_cache_gb)]
    config = parse(RLRunConfig, argv, "switch").config
    watchdog = SimpleNamespace(phase=lambda *_: nullcontext())
    from mindspeed_rl.launch.job import Job

    plan = check_rl(config, world.size, files=False)  # the model has no tokenizer
    return Job(config, plan, world, platform, cast(Any, watchdog), ())


def build(job: Any) -> tuple[machine.Phases, machine.Sharing, Any]:
    """The product's trainer (after one update), engine and state machine, in TRAIN."""
    from mindspeed_rl.algorithms.losses import supervised_loss
    from mindspeed_rl.data.packing import TrainSample
    from mindspeed_rl.orchestration import rl_phases, training

    training.initialize_parallel(job)
    policy = training.build_engine(job, "policy", 1)
    samples = [TrainSample(i, torch.arange(5, 21), 8, None, 0.0) for i in range(job.world.size)]
    batches = training.local_batches(job, policy, samples)
    num_tokens = 8 * len(samples)
    policy.forward_backward(batches, lambda inputs: supervised_loss(inputs, num_tokens))
    policy.step()  # makes the moments
    sharing = rl_phases.share_memory(job, policy, None)
    sharing.leave_all()
    engine = rl_phases.build_rollout_engine(job)
    phases = rl_phases.build_phases(job, policy, engine, sharing, lambda _: nullcontext())
    phases.to_train()
    return phases, sharing, engine


def sizes(sharing: machine.Sharing, engine: Any) -> dict[str, int]:
    """Bytes of one whole switch on this rank, there and back."""
    owned = {owner.value: group.num_bytes() for owner, group in sharing.groups.items()}
    kept = owned[Owner.PARAMETERS] + owned[Owner.OPTIMIZER]
    return {
        **owned,
        "engine_weights": engine.weight_bytes,
        "kv_cache": engine.cache_bytes,
        "copied": 2 * kept + engine.weight_bytes,
    }


@contextmanager
def timed(into: list[float]) -> Iterator[None]:
    """Append the seconds of the block."""
    begin = time.perf_counter()
    yield
    into.append(time.perf_counter() - begin)


@contextmanager
def timed_actions(into: Seconds) -> Iterator[None]:
    """Every action of the state machine by name."""

    def clocked(action: transition.Action) -> transition.Action:
        def do() -> None:
            with timed(into[action.name]):
                action.do()

        return transition.Action(action.name, action.phase, do, action.undo)

    def perform(actions: Sequence[transition.Action], phase: Any) -> None:
        transition.perform([clocked(action) for action in actions], phase)

    with mock.patch.object(machine, "perform", perform):
        yield


def sequential(
    sharing: machine.Sharing,
    phases: machine.Phases,
    engine: Any,
    cycle: int,
    into: Seconds,
) -> None:
    """The recipe's steps, tensor by tensor; ends where it began, with the machine none the wiser.

    gradients away, optimizer away | empty engine weights, reshard | parameters away, cache
    | cache away, engine weights away | parameters back, optimizer back, gradients back.
    """
    groups = sharing.groups
    step: Callable[[str], Any] = lambda name: timed(into[name])  # noqa: E731
    with step("offload grad_buffers"):
        gradients = away(groups[Owner.GRAD_BUFFERS], keep=False)
    with step("offload optimizer"):
        optimizer = away(groups[Owner.OPTIMIZER])
    with step("engine weights"):
        engine.wake(["weights"])
    with step("reshard"):
        phases._sync.run(engine, 10**6 + cycle)
    with step("offload parameters"):
        parameters = away(groups[Owner.PARAMETERS])
    with step("cache"):
        engine.wake(["kv_cache"])
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
    """Each storage to host memory of its own, allocated now."""
    found: Away = []
    for storage in storages_of(group._find()):
        host = as_bytes(storage).clone() if keep else None
        found.append((storage, storage.nbytes(), host))
        storage.resize_(0)
    return found


def back(stored: Away) -> None:
    """Each storage from its host memory, which is given up."""
    for storage, size, host in stored:
        storage.resize_(size)
        if host is not None:  # gradients are zeroed by the update itself, as in ours
            as_bytes(storage).copy_(host)


def plain_copy(bytes_of: dict[str, int], large_pages: bool) -> None:
    """As many bytes from warm memory, 64 MiB at a time, into memory as warm as the switch has it.

    What goes to the host goes into the same memory again and again. What comes back and the
    engine's weights go into pages that were just allocated: ordinary ones, as any plain copy gets
    them, or large ones, as ours asks for.
    """
    piece = 64 << 20
    source = _warm(piece)
    to_host = (bytes_of["copied"] - bytes_of["engine_weights"]) // 2
    target = source.clone()
    for left, fresh in ((to_host, False), (bytes_of["copied"] - to_host, True)):
        while left > 0:
            size = min(piece, left)
            if fresh:
                target = torch.empty(size, dtype=torch.uint8)
                if large_pages:
                    advise_large_pages(target.data_ptr(), size)
            target[:size].copy_(source[:size])
            left -= size


_WARM: list[torch.Tensor] = []


def _warm(size: int) -> torch.Tensor:
    if not _WARM:
        _WARM.append(torch.ones(size, dtype=torch.uint8))
    return _WARM[0]


def report(
    args: argparse.Namespace,
    bytes_of: dict[str, int],
    ways: list[Seconds],
    series: tuple[array[float], array[float]],
) -> dict[str, Any] | None:
    """Gather, print, give the record. Collective: the world."""
    trends = [fit(values) for fit, values in zip((drift, trend), series, strict=True)]
    mine = ([{k: statistics.median(v) for k, v in way.items()} for way in ways], trends)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    if dist.get_rank():
        return None
    ours, theirs, plain = (
        {name: max(rank[0][i][name] for rank in ranks) for name in ranks[0][0][i]} for i in range(3)
    )
    print(f"{'MB on a rank':24}" + "  ".join(f"{k} {v / 1e6:.0f}" for k, v in bytes_of.items()))
    print(f"{'action':24}{'ours s':>10}{'sequential s':>14}")
    for name in ours:
        other = f"{theirs[name]:14.4f}" if name in theirs else ""
        print(f"{name:24}{ours[name]:10.4f}{other}")
    for name, value in plain.items():
        print(
            f"plain copy into {name}: {value:.4f} s; ours is {ours['total'] / value:.2f} of it "
            f"(limit 2 and 0.05 s: {2 * value + 0.05:.4f} s), "
            f"sequential {theirs['total'] / value:.2f}"
        )
    of_rank = [rank[1] for rank in ranks]
    for rank, ((growth, error), (slope, slope_error)) in enumerate(of_rank):
        print(
            f"rank {rank}, {args.cycles} switches, the last four fifths, 2 standard errors: drift "
            f"of resident memory {growth / 1024:+.4f} +- {2 * error / 1024:.4f} KiB, least squares "
            f"of the seconds {slope * 1e6:+.2f} +- {2 * slope_error * 1e6:.2f} us per switch"
        )
    return {
        "ranks": len(ranks),
        "cycles": args.cycles,
        "bytes": bytes_of,
        "ours_s": ours,
        "sequential_s": theirs,
        "plain_copy_s": plain,
        "ratio_to_plain_copy": {k: ours["total"] / v for k, v in plain.items()},
        "ratio_to_sequential": ours["total"] / theirs["total"],
        "rss_bytes_per_switch": [t[0] for t in of_rank],
        "seconds_per_switch": [t[1] for t in of_rank],
    }


def drift(values: Sequence[float]) -> tuple[float, float]:
    """Mean growth per switch and its standard error, the first fifth left out.

    Memory moves by pages and stays where it is: a random walk, in which least squares would take
    every page for a trend. The growth of a switch has the mean (x_n - x_0) / n and the variance of
    the single steps (Box, Jenkins, "Time Series Analysis", 4.2: random walk with drift).
    """
    kept = values[len(values) // 5 :]
    steps = [after - before for before, after in pairwise(kept)]
    if len(steps) < 2:
        return 0.0, math.inf
    return statistics.fmean(steps), statistics.stdev(steps) / math.sqrt(len(steps))


def trend(values: Sequence[float]) -> tuple[float, float]:
    """Slope per switch and its standard error, the first fifth left out."""
    kept = values[len(values) // 5 :]
    slope = Slope(window=max(5, len(kept)))
    for value in kept:
        slope.add(value)
    return slope.per_step()
