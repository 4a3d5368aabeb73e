"""Metrics keep their reduction over micro-batches and ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.spawn import spawn

from mindspeed_rl.metrics.metric_set import (
    Max,
    Mean,
    Metric,
    MetricSet,
    Total,
    combine,
    reduce_metrics,
)

# Integers as floats: their sums are exact, so that associativity holds to the bit.
_NUMBERS = st.integers(-(2**40), 2**40).map(float)
_MEANS = st.builds(Mean, _NUMBERS, st.integers(0, 2**40).map(float))
_METRICS: dict[str, st.SearchStrategy[Metric]] = {
    "loss": _MEANS,
    "ratio_max": st.builds(Max, _NUMBERS),
    "tokens": st.builds(Total, _NUMBERS),
}
_SETS = st.fixed_dictionaries({}, optional=_METRICS).map(lambda metrics: MetricSet(metrics))


@given(_SETS, _SETS, _SETS)
def test_merge_is_associative_and_commutative(a: MetricSet, b: MetricSet, c: MetricSet) -> None:
    assert a.merge(b).merge(c) == a.merge(b.merge(c))
    assert a.merge(b) == b.merge(a)
    assert a.merge(MetricSet()) == a


def test_merge_leaves_its_inputs_alone() -> None:
    a, b = MetricSet(x=Total(1)), MetricSet(x=Total(2), y=Max(3))
    assert a.merge(b) == {"x": Total(3), "y": Max(3)}
    assert (a, b) == ({"x": Total(1)}, {"x": Total(2), "y": Max(3)})


@given(st.lists(_NUMBERS, min_size=2, max_size=20), st.data())
def test_mean_does_not_depend_on_the_micro_batch_split(
    values: list[float], data: st.DataObject
) -> None:
    """The mean of micro-batch means is wrong when they differ in size; this is not that."""
    cut = data.draw(st.integers(0, len(values)))
    both = combine(Mean.of(values[:cut]), Mean.of(values[cut:]))
    assert both.value == math.fsum(values) / len(values)


def test_nan_survives_in_either_order() -> None:
    assert math.isnan(combine(Max(math.nan), Max(1.0)).value)
    assert math.isnan(combine(Max(1.0), Max(math.nan)).value)


def test_kinds_do_not_mix() -> None:
    with pytest.raises(TypeError):
        MetricSet(loss=Mean(1, 1)).merge({"loss": Max(1)})


def test_single_process() -> None:
    got = reduce_metrics({"b": Mean(3, 4), "a": Max(2), "c": Mean(0, 0)})
    assert list(got) == ["a", "b", "c"]
    assert (got["a"], got["b"]) == (2.0, 0.75)
    assert math.isnan(got["c"])
    assert reduce_metrics({}) == {}


_NUM_MANY = 300


def _metrics_of_rank(rank: int) -> dict[str, Metric]:
    many: dict[str, Metric] = {f"many/{i}": Total(float(i + rank)) for i in range(_NUM_MANY)}
    return many | {
        "loss": Mean(10.0, 1.0) if rank == 0 else Mean(2.0, 3.0),
        "largest": Max(-5.0 if rank == 0 else -7.0),
        # 2**53 - 1 survives only if nobody passes through float32.
        "tokens": Total(2.0**53 - 2 if rank == 0 else 1.0),
        "nothing_here": Mean(0.0, 0.0) if rank == 0 else Mean(6.0, 2.0),
        "poisoned": Max(math.nan if rank == 0 else 1.0),
    }


def _reduce_on_rank(rank: int, store: str) -> None:
    dist.init_process_group("gloo", f"file://{store}", world_size=2, rank=rank)
    try:
        got = reduce_metrics(_metrics_of_rank(rank))
        assert got["loss"] == 3.0
        assert got["largest"] == -5.0
        assert got["tokens"] == 2.0**53 - 1
        assert got["nothing_here"] == 3.0
        assert math.isnan(got["poisoned"])
        assert [got[f"many/{i}"] for i in range(_NUM_MANY)] == [2 * i + 1 for i in range(_NUM_MANY)]

        # Different numbers of names, so that messages sized by content would not match either.
        only_here: dict[str, Metric] = {"kl": Mean(1, 1)} if rank == 0 else {}
        with pytest.raises(RuntimeError, match=r"kl .*\[0\]"):
            reduce_metrics({"loss": Mean(1, 1), **only_here})
        kind = Mean(1, 1) if rank == 0 else Max(1)
        with pytest.raises(RuntimeError, match=r"loss .*\[1\]"):
            reduce_metrics({"loss": kind})

        # The group is as usable after an error as before.
        assert reduce_metrics({"n": Total(1)}) == {"n": 2.0}
    finally:
        dist.destroy_process_group()


@pytest.mark.distributed
def test_reduction_over_two_ranks(tmp_path: Path) -> None:
    spawn(_reduce_on_rank, args=(str(tmp_path / "store"),), nprocs=2)  # type: ignore[no-untyped-call]
