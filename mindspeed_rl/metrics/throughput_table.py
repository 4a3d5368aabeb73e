"""The table at the end of a throughput run: what published throughput runs report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import harmonic_mean

from mindspeed_rl.core.memory import MemoryPhase
from mindspeed_rl.core.tables import aligned
from mindspeed_rl.metrics.names import STEP_TIME, TOKENS_PER_S

_GIB = 2**30
# Phases of the timer in which the predicted moment of a step lies.
_MOMENTS = {
    MemoryPhase.ROLLOUT: ("generate",),
    MemoryPhase.TRAIN: ("train", "update"),
    MemoryPhase.SYNC: ("reshard",),
}
_PARTS = {"step": "", "rollout": "rollout_", "update": "update_"}
_UNITS = ("", "_per_device", "_per_card")


def benchmark_lines(
    steps: Sequence[Mapping[str, float]], predicted: Mapping[MemoryPhase, int]
) -> Iterator[str]:
    """Yield the lines of the table. Local.

    Args:
        steps: Metrics of each step, at least one. The first step, which also warms up kernels and
            allocators, is left out of means where there are others.
        predicted: Bytes of the fullest rank at the moments of a step, as they were predicted.
    """
    counted = steps[1:] or steps
    first = 2 if len(steps) > 1 else 1
    yield f"throughput, mean of steps {first} to {len(steps)}:"
    yield from _indented(_seconds(counted))
    yield from _indented(_rates(counted))
    engine = ("rollout/preemptions", "rollout/kv_cache_use_max", "rollout/prefix_cache_hit_rate")
    yield "  " + ", ".join(f"{name} {_mean(counted, name):.4g}" for name in engine)
    if "throughput/update_mfu" in counted[0]:
        share = _rate(counted, "throughput/update_mfu")
        yield f"  model FLOPs utilisation of the update {share:.1%}"
    yield "peak memory of the fullest rank, GiB, all steps:"
    yield from _indented(_memory(steps, predicted))


def _indented(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield from (f"  {line}" for line in aligned(rows))


def _mean(steps: Sequence[Mapping[str, float]], name: str) -> float:
    return sum(step.get(name, 0.0) for step in steps) / len(steps)


def _rate(steps: Sequence[Mapping[str, float]], name: str) -> float:
    """Return the rate over all steps: they have equally much work, so its mean is harmonic.

    Not a number where no step has it.
    """
    found = [step[name] for step in steps if name in step]
    return harmonic_mean(found) if found else math.nan


def _seconds(steps: Sequence[Mapping[str, float]]) -> list[list[str]]:
    """Return the mean seconds of each phase, the longest first, and of the slowest rank."""
    whole = _mean(steps, STEP_TIME)
    names = {name for step in steps for name in step if name.startswith("time/")} - {STEP_TIME}
    means = {name: _mean(steps, name) for name in names}
    rows = [["phase", "seconds", "share", "slowest rank"]]
    for name in sorted(names, key=lambda name: (-means[name], name)):
        slowest = _mean(steps, name.replace("time/", "time_max/", 1))
        phase = name.removeprefix("time/").removesuffix("_s")
        rows.append([phase, f"{means[name]:.3f}", f"{means[name] / whole:.1%}", f"{slowest:.3f}"])
    return [*rows, ["step", f"{whole:.3f}", "", ""]]


def _rates(steps: Sequence[Mapping[str, float]]) -> list[list[str]]:
    """Return tokens per second of each part, of responses and of all tokens."""
    group, _, rate = TOKENS_PER_S.partition("/")
    units = [unit for unit in _UNITS if f"{TOKENS_PER_S}{unit}" in steps[0]]
    rows = [["tokens/s of", "", *(unit.replace("_", " ").strip() or "in all" for unit in units)]]
    for part, prefix in _PARTS.items():
        for kind, which in (("", "response"), ("all_", "prompt + response")):
            names = (f"{group}/{prefix}{kind}{rate}{unit}" for unit in units)
            rows.append([part, which, *(f"{_rate(steps, name):.1f}" for name in names)])
    return rows


def _memory(
    steps: Sequence[Mapping[str, float]], predicted: Mapping[MemoryPhase, int]
) -> list[list[str]]:
    """Return measured peaks beside predicted ones.

    What no owner accounts for at the border of training (interpreter and libraries where the device
    is the host) is not predicted, and is taken off in the last column.
    """
    residue = max(
        step.get("memory/train_used_bytes", 0.0) - step.get("memory/train_owned_bytes", 0.0)
        for step in steps
    )
    rows = [["moment", "measured", "predicted", "measured, without what has no owner"]]
    for moment, phases in _MOMENTS.items():
        names = [f"memory/{phase}_peak_bytes" for phase in phases]
        measured = max(step.get(name, 0.0) for step in steps for name in names)
        sizes = (measured, predicted[moment], measured - residue)
        rows.append([moment.value, *(f"{size / _GIB:.3f}" for size in sizes)])
    return rows
