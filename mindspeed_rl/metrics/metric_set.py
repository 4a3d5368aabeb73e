"""Metrics that carry their own reduction.

A number without its denominator cannot be averaged over micro-batches, steps or ranks, so metrics
are not plain floats: a loss function returns ``Mean(sum_of_losses, num_tokens)``, and every later
stage can only combine it the right way. ``weight`` counts what the mean is over: tokens, samples or
groups.

    micro-batches --combine--> one MetricSet per rank --reduce_metrics--> dict[str, float]
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from mindspeed_rl.parallel.small_collectives import gather_objects, gather_rows


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean, kept as ``sum`` and ``weight``; NaN while nothing has been counted.

    The mean does not change when several ranks hold the same values (replicas over TP), because
    both parts scale.
    """

    sum: float
    weight: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Mean:
        """Return the mean of ``values``, each with weight 1."""
        values = tuple(values)
        return cls(math.fsum(values), float(len(values)))

    @property
    def value(self) -> float:
        return self.sum / self.weight if self.weight else math.nan


@dataclass(frozen=True, slots=True)
class Max:
    """The largest of some values; NaN if any of them is NaN."""

    value: float = -math.inf


@dataclass(frozen=True, slots=True)
class Total:
    """A sum, such as of tokens, errors or bytes; of several replicas only one may report it."""

    value: float


Metric: TypeAlias = Mean | Max | Total


def combine(a: Metric, b: Metric) -> Metric:
    """Return the metric over the values of both ``a`` and ``b``.

    Raises:
        TypeError: The two carry different reductions, or are not metrics.
    """
    match a, b:
        case Mean(), Mean():
            return Mean(a.sum + b.sum, a.weight + b.weight)
        case Total(), Total():
            return Total(a.value + b.value)
        # numpy's maximum propagates NaN from either side; that of Python depends on the order.
        case Max(), Max():
            return Max(float(np.maximum(a.value, b.value)))
    raise TypeError(f"cannot combine {a!r} with {b!r}: both must be the same kind of Metric")


class MetricSet(dict[str, Metric]):
    """Metrics by name, for example ``{"reward/mean": Mean(12.0, 16.0)}``."""

    def merge(self, other: Mapping[str, Metric]) -> MetricSet:
        """Return a new set with the names of both; metrics that both hold are combined."""
        merged = MetricSet(self)
        for name, metric in other.items():
            merged[name] = combine(merged[name], metric) if name in merged else metric
        return merged


def reduce_metrics(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Reduce every metric over all ranks and return plain numbers, by sorted name.

    Collective: the world. Every rank calls it with the same names and kinds; a rank that has
    nothing to add passes ``Mean(0, 0)``, ``Total(0)`` or ``Max()``. All ranks return the same bits.
    Without a process group the metrics of this process are returned.

    Raises:
        RuntimeError: Names or kinds differ between ranks (raised on all of them).
    """
    names = sorted(metrics)
    schema = [f"{name} ({type(metrics[name]).__name__})" for name in names]
    parts = np.array([_parts(metrics[name]) for name in names], np.float64).reshape(1, -1, 2)
    if dist.is_initialized() and dist.get_world_size() > 1:
        _check_schema(schema)
        # Bit patterns are sent as integers, and all ranks sum in the same order.
        bits = gather_rows(torch.from_numpy(parts[0].view(np.int64)))
        parts = bits.numpy().view(np.float64)
    with np.errstate(invalid="ignore"):  # sums of infinite maxima are not used
        sums = parts.sum(axis=0).tolist()
    highest = parts[..., 0].max(axis=0).tolist()
    values = {}
    for name, (first, second), high in zip(names, sums, highest, strict=True):
        match metrics[name]:
            case Mean():
                values[name] = Mean(first, second).value
            case Total():
                values[name] = first
            case Max():
                values[name] = high
    return values


def _parts(metric: Metric) -> tuple[float, float]:
    return (metric.sum, metric.weight) if isinstance(metric, Mean) else (metric.value, 0.0)


def _check_schema(schema: Sequence[str]) -> None:
    """Check that all ranks have the same names and kinds. Collective: the world.

    Only digests are compared while they agree: messages of unequal sizes would hang or crash.

    Raises:
        RuntimeError: Some differ; the message names them and the ranks that have them.
    """
    digest = hashlib.sha256("\n".join(schema).encode()).digest()[:8]
    digests = gather_rows(torch.from_numpy(np.frombuffer(digest, np.int64).copy()))
    if len(set(digests.flatten().tolist())) == 1:
        return
    by_rank = gather_objects(set(schema))
    lines = []
    for name in sorted(by_rank[0].union(*by_rank) - by_rank[0].intersection(*by_rank)):
        ranks = [rank for rank, names in enumerate(by_rank) if name in names]
        lines.append(f"  {name}: only on {len(ranks)} of {len(by_rank)} ranks: {ranks[:8]}")
    raise RuntimeError(
        "metric names or kinds differ between the ranks of a reduction:\n"
        + "\n".join(lines)
        + "\nevery rank must report every name; one with nothing to add reports Mean(0, 0), "
        "Total(0) or Max()"
    )
