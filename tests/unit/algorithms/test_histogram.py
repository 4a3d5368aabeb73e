"""Quantiles of magnitudes are those of a sort within a bin, however ranks share the values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.shared_sums import Reduce, alone, on_ranks
from support.waits import Waits

from mindspeed_rl.algorithms.histogram import (
    BINS_PER_OCTAVE,
    MagnitudeHistogram,
    lower_edges,
)

CPU = torch.device("cpu")
SHARES = [0.5, 0.1, 0.01, 1e-9]


def counted(*parts: torch.Tensor) -> MagnitudeHistogram:
    found = MagnitudeHistogram.empty(CPU)
    for part in parts:
        found.add(part)
    return found


def exact(values: torch.Tensor, share: float) -> float:
    """The largest magnitude that a share of the values reaches, by sorting."""
    ordered = np.sort(np.abs(values.double().numpy()))[::-1]
    return float(ordered[max(1, int(share * len(ordered))) - 1])


@given(st.lists(st.floats(-1023, 1023, width=32), min_size=1, max_size=80), st.sampled_from(SHARES))
@settings(deadline=None)
def test_a_quantile_is_that_of_a_sort_within_a_bin(values: list[float], share: float) -> None:
    part = torch.tensor(values, dtype=torch.float32)
    wanted = exact(part, share)
    (found,) = counted(part).upper_quantiles([share], alone)
    assert found <= wanted < found + max(found / BINS_PER_OCTAVE, 2.0**-30)


def test_values_that_are_not_counted_do_not_show() -> None:
    generator = torch.Generator().manual_seed(1)
    values, mask = torch.randn(200, generator=generator), torch.arange(200) % 3 == 0
    found = MagnitudeHistogram.empty(CPU)
    with Waits() as waits:
        found.add(values.masked_fill(~mask, math.nan), mask)
    assert waits.found == {}
    assert torch.equal(found.counts, counted(values[mask]).counts)


def test_log_uniform_values_of_all_ranks() -> None:
    """Of uneven shares of the values, one of them none; all ranks say the same."""
    generator = torch.Generator().manual_seed(0)
    values = 10 ** (8 * torch.rand(5000, generator=generator) - 7)
    values[::2] *= -1
    cuts = [slice(0, 1200), slice(1200, 1200), slice(1200, 5000)]

    def work(rank: int, reduce: Reduce) -> list[float]:
        mine = values[cuts[rank]]
        return counted(mine[:500], mine[500:]).upper_quantiles(SHARES, reduce)

    first, *others = on_ranks(3, work)
    assert others == [first, first]
    assert first == counted(values).upper_quantiles(SHARES, alone)
    for found, share in zip(first, SHARES, strict=True):
        assert found <= exact(values, share) < found * (1 + 1 / BINS_PER_OCTAVE)


def test_a_quantile_may_be_asked_for_again() -> None:
    """The counts of a rank stay its own after a sum over ranks."""
    histogram = counted(torch.tensor([0.25, 1.0]))
    asked = [histogram.upper_quantiles([1.0, 0.5], lambda counts: counts.mul_(2)) for _ in "ab"]
    assert asked == [[0.25, 1.0]] * 2


def test_edges_are_exact() -> None:
    """A value on an edge is in the bin that begins there; the float below it is not."""
    edges = torch.tensor(lower_edges()[1:], dtype=torch.float32)
    assert edges.double().tolist() == lower_edges()[1:], "fp32 holds them"
    assert (edges[1:] / edges[:-1]).max() <= 1 + 1 / BINS_PER_OCTAVE
    below = torch.nextafter(edges, torch.zeros(()))
    ones = [0, *[1] * len(edges)]
    assert counted(edges).counts.tolist() == counted(-edges).counts.tolist() == ones
    assert counted(below).counts.tolist() == [*ones[1:], 0]


@pytest.mark.parametrize(
    ("value", "told"),
    [(0.0, 0.0), (1e-12, 0.0), (5000.0, 1024.0), (math.inf, 1024.0), (-math.nan, 1024.0)],
)
def test_values_outside_the_bins(value: float, told: float) -> None:
    """What is no number counts as the largest."""
    assert counted(torch.tensor([value])).upper_quantiles([1.0], alone) == [told]


def test_without_a_value_there_is_no_quantile() -> None:
    assert counted(torch.zeros(0)).upper_quantiles([0.5, 0.01], alone) == [-math.inf] * 2
