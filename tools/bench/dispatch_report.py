"""What `dispatch.py` prints: the table, the planes, the growth with W, the predictions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.dispatch_fit import Plane, Point

MB = 2**20
PREDICTED = (
    "controller",
    "ray with cache, agree",
    "ray with cache, move",
    "spmd, agree",
    "spmd, move",
)
MOVING = ("controller", "ray with cache, move", "spmd, move", "bare")


@dataclass(frozen=True, slots=True)
class Practice:
    """The published run whose start skew is the yardstick (cann-recipes-train, DeepSeek-R1).

    Attributes:
        workers: dies.
        samples: of a step, 512 prompts x 16.
        response: tokens that each is padded to.
        padded_bytes: of a padded token: ids, mask, positions and responses in int64, a log-prob.
        replicas: workers that get the same part, TP 4 x PP 8.
        mean_tokens: prompt and response as they are.
        token_bytes: of such a token in the cache: an id and a log-prob.
    """

    workers: int = 256
    samples: int = 8192
    response: int = 3072
    padded_bytes: int = 36
    replicas: int = 32
    mean_tokens: float = 1654.4
    token_bytes: int = 8

    @property
    def dispatched_mb(self) -> float:
        """What a controller serialises."""
        return self.samples * self.response * self.padded_bytes * self.replicas / MB

    @property
    def worker_mb(self) -> float:
        """What one worker has to have: the samples of its data-parallel rank."""
        ranks = self.workers / self.replicas
        return self.samples * self.mean_tokens * self.token_bytes / ranks / MB


def table(
    points: Mapping[str, Sequence[Point]], skews: Mapping[str, Sequence[Point]], memcpy: float
) -> list[str]:
    """Seconds and start skew of every way at every W and B."""
    lines = [
        f"memcpy: {memcpy / 1e9:.2f} GB/s",
        f"{'way':>22} {'W':>3} {'B MB':>5} {'seconds':>8} {'skew ms':>8} {'of memcpy':>9}",
    ]
    for way, found in points.items():
        for i, p in enumerate(found):
            speed = p.megabytes * MB / p.seconds / memcpy
            skew = f"{1e3 * skews[way][i].seconds:8.1f}"
            share = f"{speed:9.1%}" if way.startswith("controller") else ""
            lines.append(
                f"{way:>22} {p.workers:3} {p.megabytes:5g} {p.seconds:8.4f} {skew} {share}"
            )
    return lines


def fits(name: str, planes: Mapping[str, Plane]) -> list[str]:
    """One line per way; ``name``: of what was fitted."""
    lines = [f"{name} = a + b B + c W, 95 % intervals:"]
    for way, plane in planes.items():
        b = plane.per_megabyte_s
        verdict = "b is not distinguishable from 0" if b.is_zero else "b is not 0"
        lines.append(f"{way:>22}: {plane}; {verdict}")
    return lines


def growth(points: Mapping[str, Sequence[Point]]) -> list[str]:
    """Seconds where all workers have the same share, as multiples of those of the fewest."""
    shares: dict[float, set[int]] = {}
    for p in points["bare"]:
        shares.setdefault(p.megabytes / p.workers, set()).add(p.workers)
    lines = ["growth with W at constant MB per worker, as a multiple of the fewest workers':"]
    for share, workers in sorted(shares.items()):
        if len(workers) < 2:
            continue
        for way in MOVING:
            at = {p.workers: p.seconds for p in points[way] if p.megabytes / p.workers == share}
            first = at[min(at)]
            row = ", ".join(f"W {w}: {at[w] / first:.2f}" for w in sorted(at))
            lines.append(f"  {share:g} MB each, {way:>20}: {row}")
    return lines


def predictions(
    seconds: Mapping[str, Plane], skews: Mapping[str, Plane], practice: Practice | None = None
) -> list[str]:
    """The planes at the published run's size, beside the start skews that it has published.

    Bytes per core are those of workers with a core each; seconds per worker are as measured.
    """
    run = practice or Practice()
    cores = len(os.sched_getaffinity(0))
    lines = [
        f"PREDICTED for {run.workers} workers, {run.samples} samples of at most {run.response} "
        f"tokens; {run.dispatched_mb / 1024:.1f} GB through the controller, each part to "
        f"{run.replicas} workers. Published start skew: 57 s (reference), 73 s (update) with the "
        "controller, < 1 s and ~5 s with its TensorCache",
    ]
    for way in PREDICTED:
        # W workers share the bandwidth of this machine's cores; there each has a core of its own.
        # That is b; c stays as measured, with W / cores workers on a core: too large where it is
        # work of each worker, such as the plan.
        megabytes = run.worker_mb * cores if way.endswith("move") else 0.0
        if way == "controller":
            megabytes = run.dispatched_mb
        total, skew = (planes[way].at(run.workers, megabytes) for planes in (seconds, skews))
        lines.append(f"{way:>22}: start skew {skew:.1f} s, hand-over {total:.1f} s")
    return lines
