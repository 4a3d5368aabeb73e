"""The ledger: owners at every border, budget, room, leaks."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mindspeed_rl.colocation.memory_ledger import MemoryLedger, slope_per_step
from mindspeed_rl.metrics.metric_set import Max
from mindspeed_rl.platforms.base import DeviceMemory

GIB = 2**30


class Device:
    """A device of 64 GiB and two owners."""

    def __init__(self) -> None:
        self.parameters, self.cache, self.residue = 10 * GIB, 0, GIB

    def memory(self) -> DeviceMemory:
        used = self.parameters + self.cache + self.residue
        return DeviceMemory(used, 64 * GIB - used, 64 * GIB)

    def ledger(self, budget_bytes: int | None = None, leak_bytes: float = 0) -> MemoryLedger:
        owners = {"parameters": lambda: self.parameters, "kv_cache": lambda: self.cache}
        predicted = {"rollout": {"parameters": 10 * GIB, "kv_cache": 21 * GIB, "unknown": 1}}
        return MemoryLedger(owners, self.memory, budget_bytes, leak_bytes, predicted)


def test_owners_and_predictions_are_noted_at_every_border() -> None:
    device = Device()
    ledger = device.ledger()
    ledger.at_border("train")
    device.cache = 20 * GIB
    ledger.at_border("rollout")
    metrics = ledger.metrics()
    assert metrics["memory/train/kv_cache_bytes"] == Max(0)
    assert metrics["memory/rollout/kv_cache_bytes"] == Max(20 * GIB)
    assert metrics["memory/rollout_owned_bytes"] == Max(30 * GIB)
    assert metrics["memory/rollout_used_bytes"] == Max(31 * GIB)
    assert metrics["memory/rollout_predicted_bytes"] == Max(31 * GIB)
    assert "memory/train_predicted_bytes" not in metrics
    assert ledger.table().splitlines() == [
        "owner            train            rollout",
        "parameters     10240.0  10240.0 (10240.0)",
        "kv_cache           0.0  20480.0 (21504.0)",
        "without owner   1024.0             1024.0",
        "in use         11264.0            31744.0",
    ]


def test_a_budget_that_is_exceeded_ends_the_run_with_the_table() -> None:
    device = Device()
    ledger = device.ledger(budget_bytes=30 * GIB)
    ledger.at_border("train")
    device.cache = 20 * GIB
    told = r"31 GiB in use, of 30 GiB that the run may use; .*lower --rollout-kv-cache-gb(.|\n)*kv_"
    with pytest.raises(MemoryError, match=told):
        ledger.at_border("rollout")
    device.residue = 50 * GIB
    with pytest.raises(MemoryError, match=r"owned neither .*raise --device-memory-gb"):
        ledger.at_border("rollout")


@pytest.mark.parametrize(("budget_gib", "fits"), [(None, True), (40, True), (30, False)])
def test_room_is_asked_for_before_it_is_taken(budget_gib: int | None, fits: bool) -> None:
    device = Device()
    ledger = device.ledger(budget_gib * GIB if budget_gib else None)
    ledger.at_border("train")
    if fits:
        ledger.require_free(20 * GIB)
        with pytest.raises(MemoryError, match="60 GiB"):
            ledger.require_free(60 * GIB)
    else:
        with pytest.raises(MemoryError, match=r"20 GiB.*19 GiB"):
            ledger.require_free(20 * GIB)


def test_slope_and_its_error_are_those_of_a_regression() -> None:
    values = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
    x = np.arange(8.0)
    design = np.stack([np.ones(8), x], axis=1)
    fit, residuals, _, _ = np.linalg.lstsq(design, np.array(values), rcond=None)
    variance = residuals[0] / 6 * np.linalg.inv(design.T @ design)[1, 1]
    assert slope_per_step(values) == pytest.approx((fit[1], math.sqrt(variance)))


def test_few_steps_have_no_slope() -> None:
    assert slope_per_step(range(4)) == (0.0, math.inf)


@pytest.mark.parametrize(("growth_mib", "warns"), [(0, 0), (30, 0), (240, 1)])
def test_a_growing_residue_is_warned_of_once(
    growth_mib: int, warns: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """240 MB per cycle is what a vllm-ascend issue reports."""
    device = Device()
    ledger = device.ledger(leak_bytes=64 * 2**20)
    for step in range(30):
        device.residue += growth_mib * 2**20 + (-1) ** step * 20 * 2**20
        ledger.at_border("train")
    told = capsys.readouterr().err
    assert told.count("warning: memory that no owner accounts for") == warns
    if warns:
        assert "grew by 24" in told
        assert "more than --memory-leak-mb 64;" in told


def test_growth_of_the_first_steps_is_no_leak(capsys: pytest.CaptureFixture[str]) -> None:
    """The optimizer's moments, an engine and libraries take memory that they then keep."""
    device = Device()
    ledger = device.ledger(leak_bytes=64 * 2**20)
    for growth_mib in (2000, 900, 300, *[0] * 20):
        device.residue += growth_mib * 2**20
        ledger.at_border("train")
    assert capsys.readouterr().err == ""


def test_a_short_run_shows_no_trend(capsys: pytest.CaptureFixture[str]) -> None:
    device = Device()
    ledger = device.ledger(leak_bytes=64 * 2**20)
    for _ in range(12):
        device.residue += 300 * 2**20
        ledger.at_border("train")
    assert capsys.readouterr().err == ""
