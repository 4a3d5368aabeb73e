"""Runs one case on this rank: every way in turn, checked, timed and weighed."""

from __future__ import annotations

import cProfile
import ctypes
import importlib
import pstats
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.cases import BuiltCase
from bench.megatron_core import MegatronCoreReshard
from bench.raw import WORLD, RawCollectives
from bench.staging import Model
from bench.strategies import (
    STRATEGIES,
    DirectReshard,
    Setting,
    Strategy,
    closed_form,
    floor_bytes,
    wire_of,
)
from bench.weights import HfWeights, differing, empty_params, load, refill
from bench.wire import trainer_groups
from mindspeed_rl.platforms.host_memory import peak_bytes, reset_peak_bytes
from mindspeed_rl.resharding.layouts.megatron import MegatronLayout

DTYPE = torch.bfloat16
UNTOUCHED = -1  # a bit pattern that no weight has


@dataclass(frozen=True, slots=True)
class Options:
    """What is run.

    Attributes:
        repeats: timed runs of each way; one more, untimed, comes first.
        bucket_bytes: bound of the staging of a round.
        ways: of the engine cases, those to race.
        folder: for the file of the weights.
        seed: of the weights.
        profile: run each way once more under Python's profiler.
    """

    repeats: int
    bucket_bytes: int
    ways: Sequence[str]
    folder: Path
    seed: int = 1
    profile: bool = False


@dataclass(slots=True)
class Samples:
    """Of one way, on this rank."""

    seconds: list[float] = field(default_factory=list)
    received_bytes: int = 0
    sent_bytes: int = 0
    extra_bytes: int = 0
    received_by: dict[tuple[str, str], int] = field(default_factory=dict)


def release_free_memory() -> None:
    """Give memory that Python and torch have freed back to the system (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def ways_of(case: BuiltCase, chosen: Sequence[str]) -> Mapping[str, Callable[[Setting], Strategy]]:
    """The ways that can do a case; of an engine's those that are chosen.

    Raises:
        ImportError: megatron-core is not installed, and the case is for it.
    """
    if not isinstance(case.target, MegatronLayout):
        return {name: STRATEGIES[name] for name in chosen}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that its CUDA extensions are not there
        for name in ("megatron.core.resharding", "megatron.core.distributed"):
            importlib.import_module(name)
    return {"direct": DirectReshard, "megatron-core": MegatronCoreReshard}


def run_case(case: BuiltCase, options: Options, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure one case. Collective: the world.

    Returns:
        On every rank: the record that ``reshard.py`` prints.

    Raises:
        RuntimeError: a way left other bits than the HF tensors have, or moved other bytes than its
            closed form says.
    """
    rank, builders = dist.get_rank(), ways_of(case, options.ways)
    hf = HfWeights(case.source, DTYPE, options.folder / f"{case.name}.bin")
    if rank == 0:
        hf.write(options.seed)
    dist.barrier()
    weights = hf.map()
    dist.barrier()
    if rank == 0:  # it stays mapped; a run that is stopped leaves nothing behind
        (options.folder / f"{case.name}.bin").unlink()
    read = empty_params(case.source, rank, DTYPE, 0)
    load(case.source, rank, read, weights)
    write = empty_params(case.target, rank, DTYPE, UNTOUCHED)
    model = Model(case.source, case.target, rank, DTYPE, read, write)
    groups = trainer_groups(case.source.parallel, rank)
    setting = Setting(model, groups, options.bucket_bytes)
    samples = {name: Samples() for name in builders}
    ways: dict[str, Strategy] = {}
    for name, build in builders.items():
        ways[name] = _first_run(name, build, setting, samples[name], weights)
        say(f"{case.name}: {name} is right")
    raw = RawCollectives(groups, case.source.parallel.world, rank)
    speeds: list[dict[tuple[str, str], float]] = [raw.measure()]
    for repeat in range(options.repeats):
        refill(write, UNTOUCHED)
        for name, way in ways.items():
            seconds = _timed(way)
            samples[name].seconds.append(seconds)
            if repeat == options.repeats - 1:
                _check(name, model, weights)
                refill(write, UNTOUCHED)
        speeds.append(raw.measure())
        took = ", ".join(f"{name} {samples[name].seconds[-1]:.2f} s" for name in ways)
        say(f"{case.name}: repeat {repeat + 1}/{options.repeats}: {took}")
    usual = {key: statistics.median(s[key] for s in speeds) for key in speeds[0]}
    record = _record(case, model, hf.num_bytes, samples, usual)
    if options.profile:
        record["profile"] = {name: _profiled(way) for name, way in ways.items()}
    return record


_PROFILE_ROWS = 6


def _profiled(way: Strategy) -> list[dict[str, Any]]:
    """Where this rank's time goes: the functions with most time of their own. Collective."""
    profiler = cProfile.Profile()
    dist.barrier()
    with profiler:
        way.run()
    found = pstats.Stats(profiler).get_stats_profile().func_profiles
    rows = sorted(found.items(), key=lambda item: -item[1].tottime)[:_PROFILE_ROWS]
    dist.barrier()
    return [{"function": name, "calls": row.ncalls, "seconds": row.tottime} for name, row in rows]


def _first_run(
    name: str,
    build: Callable[[Setting], Strategy],
    setting: Setting,
    samples: Samples,
    weights: Mapping[str, torch.Tensor],
) -> Strategy:
    """Build and run once: memory, bytes, bits."""
    refill(setting.model.write, UNTOUCHED)
    release_free_memory()
    dist.barrier()
    reset_peak_bytes()
    before = peak_bytes()
    way = build(setting)
    way.run()
    samples.extra_bytes = peak_bytes() - before
    traffic = way.traffic()
    samples.received_bytes, samples.sent_bytes = traffic.received_bytes, traffic.sent_bytes
    wire = wire_of(way)
    samples.received_by = dict(wire.received_by) if wire else {}
    _check(name, setting.model, weights)
    _check_bytes(name, setting.model, samples)
    return way


def _check(name: str, model: Model, weights: Mapping[str, torch.Tensor]) -> None:
    wrong = list(differing(model.target, model.rank, model.write, weights))
    everyone: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, wrong)
    for rank, names in enumerate(everyone):
        if names:
            raise RuntimeError(
                f"{name}: {len(names)} parameters of rank {rank} differ from the HF tensors, first "
                f"{names[0]}"
            )


def _check_bytes(name: str, model: Model, samples: Samples) -> None:
    volumes = closed_form(name, model)
    if volumes is None:
        return
    claimed = (volumes.recv_bytes[model.rank], volumes.send_bytes[model.rank])
    found = (samples.received_bytes, samples.sent_bytes)
    if claimed != found:
        raise RuntimeError(
            f"{name}: rank {model.rank} received and sent {found} bytes, the closed form says "
            f"{claimed}"
        )


def _timed(way: Strategy) -> float:
    """Seconds until all ranks are done. Collective: the world."""
    dist.barrier()
    start_s = time.perf_counter()
    way.run()
    dist.barrier()
    return time.perf_counter() - start_s


def _record(
    case: BuiltCase,
    model: Model,
    num_bytes: int,
    samples: Mapping[str, Samples],
    speeds: Mapping[tuple[str, str], float],
) -> dict[str, Any]:
    """One case as plain numbers; the same on all ranks."""
    mine = (samples, dict(speeds), floor_bytes(model))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    raw = {key: statistics.fmean(other[1][key] for other in everyone) for key in speeds}
    ways = {name: _way([other[0][name] for other in everyone], raw) for name in samples}
    for way in ways.values():
        way["times_direct"] = way["median_s"] / ways["direct"]["median_s"]
    return {
        "case": case.name,
        "title": case.title,
        "ranks": dist.get_world_size(),
        "weights_bytes": num_bytes,
        "raw_bytes_per_s": {" ".join(key): speed for key, speed in raw.items()},
        "floor_bytes": _spread([other[2] for other in everyone]),
        "strategies": ways,
    }


def _way(ranks: Sequence[Samples], raw: Mapping[tuple[str, str], float]) -> dict[str, Any]:
    seconds = [max(r.seconds[i] for r in ranks) for i in range(len(ranks[0].seconds))]
    median_s = statistics.median(seconds)
    busiest = max(max(r.received_bytes, r.sent_bytes) for r in ranks)
    keys = ranks[0].received_by
    bare_s = sum(max(r.received_by[key] for r in ranks) / raw[key] for key in keys)
    return {
        "best_s": min(seconds),
        "median_s": median_s,
        "wire_bytes": sum(r.received_bytes for r in ranks),
        "recv_bytes": _spread([r.received_bytes for r in ranks]),
        "send_bytes": _spread([r.sent_bytes for r in ranks]),
        "peak_extra_bytes": max(r.extra_bytes for r in ranks),
        "share_of_raw_all_to_all": busiest / median_s / raw[WORLD],
        "share_of_raw_collectives": bare_s / median_s if keys else None,
    }


def _spread(values: Sequence[int]) -> dict[str, float]:
    return {"min": min(values), "mean": statistics.fmean(values), "max": max(values)}
