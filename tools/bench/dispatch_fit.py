"""The plane through the points of `dispatch.py`: seconds = a + b B + c W, with 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement: W workers, B MB of all samples together, seconds."""

    workers: int
    megabytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """A coefficient; half of its 95 % interval."""

    value: float
    half: float

    @property
    def is_zero(self) -> bool:
        """Whether zero is inside the interval."""
        return abs(self.value) <= self.half

    def __str__(self) -> str:
        return f"{self.value:.3g} +- {self.half:.2g}"


@dataclass(frozen=True, slots=True)
class Plane:
    """The coefficients.

    Attributes:
        base_s: a, seconds.
        per_megabyte_s: b, seconds per MB.
        per_worker_s: c, seconds per worker.
    """

    base_s: Estimate
    per_megabyte_s: Estimate
    per_worker_s: Estimate

    def at(self, workers: float, megabytes: float) -> float:
        """Seconds that the plane predicts, not below 0."""
        a, b, c = self.base_s.value, self.per_megabyte_s.value, self.per_worker_s.value
        return max(0.0, a + b * megabytes + c * workers)

    def __str__(self) -> str:
        return f"a {self.base_s} s, b {self.per_megabyte_s} s/MB, c {self.per_worker_s} s/worker"


def fit(points: Sequence[Point]) -> Plane:
    """Least squares.

    Raises:
        ValueError: too few or too similar points for three coefficients.
    """
    rows = np.array([(1.0, p.megabytes, p.workers) for p in points])
    seconds = np.array([p.seconds for p in points])
    freedom = len(points) - 3
    if freedom < 1 or np.linalg.matrix_rank(rows) < 3:
        raise ValueError(
            f"{len(points)} points determine no plane: take several values of --workers and of "
            "--megabytes"
        )
    values, *_ = np.linalg.lstsq(rows, seconds, rcond=None)
    variance = float(((seconds - rows @ values) ** 2).sum()) / freedom
    spread = np.sqrt(variance * np.diag(np.linalg.inv(rows.T @ rows)))
    t = student_t(freedom)
    base, per_megabyte, per_worker = (
        Estimate(float(v), t * float(s)) for v, s in zip(values, spread, strict=True)
    )
    return Plane(base, per_megabyte, per_worker)


def student_t(freedom: int) -> float:
    """The two-sided 95 % point of Student's distribution, by bisection of its integral."""
    low, high = 1.9, 13.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < 0.95 else (low, middle)
    return (low + high) / 2


def _within(t: float, freedom: int) -> float:
    """Probability of [-t, t]: with t = sqrt(n) tan(x) the density is cos(x)^(n - 1)."""
    grid = np.linspace(0.0, math.atan(t / math.sqrt(freedom)), 4001)
    area = float(np.trapezoid(np.cos(grid) ** (freedom - 1), grid))
    ratio = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
    return 2 * ratio / math.sqrt(math.pi) * area
