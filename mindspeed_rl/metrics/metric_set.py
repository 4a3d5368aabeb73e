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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from mindspeed_rl.parallel.small_collectives import gather_rows


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean, kept as ``sum`` and ``weight``; NaN while nothing has been counted.

    The mean does not change when several ranks hold the same values (replicas over TP), because
    both parts scale.
    """

    sum: float
    weight: float

    def __post_init__(self) -> None:
        if not self.weight >= 0:
            raise RuntimeError(f"Mean.weight is {self.weight}; it must be a count or weight >= 0")

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
class Min:
    """The smallest of some values; NaN if any of them is NaN."""

    value: float = math.inf


@dataclass(frozen=True, slots=True)
class Total:
    """A sum, such as of tokens, errors or bytes; of several replicas only one may report it."""

    value: float


Metric: TypeAlias = Mean | Max | Min | Total


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
        # numpy's pair propagates NaN from either side; Python's max and min depend on the order.
        case Max(), Max():
            return Max(float(np.maximum(a.value, b.value)))
        case Min(), Min():
            return Min(float(np.minimum(a.value, b.value)))
    raise TypeError(f"cannot combine {a!r} with {b!r}: both must be the same kind of Metric")


class MetricSet(dict[str, Metric]):
    """Metrics by name, for example ``{"reward/mean": Mean(12.0, 16.0)}``."""

    def merge(self, other: Mapping[str, Metric]) -> MetricSet:
        """Return a new set with the names of both; metrics that both hold are combined."""
        merged = MetricSet(self)
        for name, metric in other.items():
            try:
                merged[name] = combine(merged[name], metric) if name in merged else metric
            except TypeError as error:
                raise TypeError(f"metric {name!r}: {error}") from None
        return merged


# Metrics in the first message. Its size is fixed, so that ranks with different names still exchange
# messages of one size and all of them see the difference; unequal sizes would hang or crash.
_FIRST_MESSAGE_METRICS = 255


def reduce_metrics(
    metrics: Mapping[str, Metric],
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, float]:
    """Reduce every metric over the ranks of ``group`` and return plain numbers, by sorted name.

    Collective: every rank of the group calls it with the same names and kinds; a rank that has
    nothing to add passes ``Mean(0, 0)``, ``Total(0)``, ``Max()`` or ``Min()``. All ranks return
    the same bits. One all-gather up to 255 metrics, two beyond. Without an initialised process
    group the metrics of this process are returned.

    Args:
        metrics: Metrics of this rank.
        group: Ranks to reduce over; ``None`` is the whole world.
        device: Device of the messages, whose tensors the group's backend must support.

    Raises:
        TypeError: A value is not a ``Metric``.
        RuntimeError: Names or kinds differ between ranks (raised on all of them).
    """
    names = sorted(metrics)
    kinds = [_kind(name, metrics[name]) for name in names]
    local = np.array([_parts(metrics[name]) for name in names], np.float64).reshape(-1, 2)
    initialized = dist.is_available() and dist.is_initialized()
    num_ranks = dist.get_world_size(group) if initialized else 1
    assert num_ranks > 0, "reduce_metrics on a rank outside the group"
    if num_ranks > 1:
        schema = [f"{name} ({kind})" for name, kind in zip(names, kinds, strict=True)]
        parts = _gather_parts(local, schema, group, torch.device(device))
    else:
        parts = local[None]
    reduced = _reduced([metrics[name] for name in names], parts)
    return {name: metric.value for name, metric in zip(names, reduced, strict=True)}


def _kind(name: str, metric: Metric) -> str:
    if not isinstance(metric, Metric):
        raise TypeError(
            f"metric {name!r} is {metric!r}; a number without its reduction cannot be reduced: "
            "pass Mean(sum, weight), Max(value), Min(value) or Total(value)"
        )
    return type(metric).__name__


def _parts(metric: Metric) -> tuple[float, float]:
    return (metric.sum, metric.weight) if isinstance(metric, Mean) else (metric.value, 0.0)


def _reduced(like: Sequence[Metric], parts: NDArray[np.float64]) -> Iterator[Metric]:
    """Reduce ``parts`` [ranks, metrics, 2], each metric by the kind of its entry in ``like``."""
    with np.errstate(invalid="ignore"):  # sums of infinite maxima are not used
        sums = parts.sum(axis=0).tolist()
    lowest, highest = parts[..., 0].min(axis=0).tolist(), parts[..., 0].max(axis=0).tolist()
    for metric, (first, second), low, high in zip(like, sums, lowest, highest, strict=True):
        if isinstance(metric, Mean):
            yield Mean(first, second)
        elif isinstance(metric, Total):
            yield Total(first)
        else:
            yield Max(high) if isinstance(metric, Max) else Min(low)


def _gather_parts(
    local: NDArray[np.float64],
    schema: list[str],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> NDArray[np.float64]:
    """Gather ``local`` [metrics, 2] of all ranks into [ranks, metrics, 2], and check schemas."""
    digest = hashlib.sha256("\n".join(schema).encode()).digest()[:8]
    # Bit patterns are sent as integers: Ascend reduces float64 as float32, while a gather of int64
    # is exact on every backend, and all ranks then sum in the same order.
    message = np.zeros(1 + 2 * _FIRST_MESSAGE_METRICS, np.int64)
    message[0] = np.frombuffer(digest, np.int64)[0]
    bits = local.view(np.int64).ravel()
    head, tail = np.split(bits, [min(bits.size, 2 * _FIRST_MESSAGE_METRICS)])
    message[1 : 1 + head.size] = head
    gathered = _all_gather(message, group, device)
    if len(np.unique(gathered[:, 0])) > 1:
        _raise_schema_mismatch(schema, group)
    all_bits = gathered[:, 1 : 1 + head.size]
    if tail.size:
        all_bits = np.concatenate([all_bits, _all_gather(tail, group, device)], axis=1)
    return np.ascontiguousarray(all_bits).view(np.float64).reshape(len(gathered), -1, 2)


def _all_gather(
    message: NDArray[np.int64], group: dist.ProcessGroup | None, device: torch.device
) -> NDArray[np.int64]:
    """Gather ``message`` [n] of every rank into [ranks, n]."""
    sent = torch.from_numpy(message).to(device)
    return gather_rows(sent, group).cpu().numpy()


def _raise_schema_mismatch(schema: list[str], group: dist.ProcessGroup | None) -> None:
    """Raise an error with the names that differ. Collective: ``group``."""
    schemas: list[list[str] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(schemas, schema, group)
    by_rank = [set(names or ()) for names in schemas]
    common = set.intersection(*by_rank)
    lines = []
    for name in sorted(set.union(*by_rank) - common):
        holders = [rank for rank, names in enumerate(by_rank) if name in names]
        lines.append(f"  {name}: only on {len(holders)} of {len(by_rank)} ranks: {holders[:8]}")
    raise RuntimeError(
        "metric names or kinds differ between the ranks of a reduction:\n"
        + "\n".join(lines)
        + "\nevery rank must report every name; one with nothing to add reports Mean(0, 0), "
        "Total(0), Max() or Min()"
    )
