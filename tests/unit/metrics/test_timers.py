"""Phases are disjoint and cover the step."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import pytest

from mindspeed_rl.metrics.metric_set import Max, Mean
from mindspeed_rl.metrics.timers import PhaseTimer
from mindspeed_rl.platforms.cpu import CpuPlatform
from mindspeed_rl.platforms.host_memory import peak_bytes, reset_peak_bytes


class _Clock:
    """Stands still until told to move."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class _Device(CpuPlatform):
    """Has queued work, and a peak of memory that the test sets; each interval begins at 10."""

    def __init__(self, clock: _Clock) -> None:
        super().__init__()
        self.clock, self.queued_s, self.peak = clock, 0.0, 10

    def wait_for_computation(self) -> None:
        self.clock.now_s += self.queued_s
        self.queued_s = 0.0

    def reset_peak_memory(self) -> None:
        self.peak = 10

    def peak_memory(self) -> int:
        return self.peak


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


@pytest.fixture
def device(clock: _Clock) -> _Device:
    return _Device(clock)


@pytest.fixture
def timer(clock: _Clock, device: _Device) -> PhaseTimer:
    return PhaseTimer(device, clock)


def test_nested_phases_are_not_counted_twice(
    clock: _Clock, device: _Device, timer: PhaseTimer
) -> None:
    clock.now_s += 0.5  # no phase
    with timer("rollout"):
        clock.now_s += 1
        device.peak = 50
        with timer("reward"):
            clock.now_s += 2
            device.peak = 30
        clock.now_s += 4
        with timer("reward"):
            clock.now_s += 8
    with timer("update"):
        clock.now_s += 16
    times = timer.finish_step()
    assert times.step_s == 31.5
    assert {name: use.seconds for name, use in times.phases.items()} == {
        "rollout": 5,
        "reward": 10,
        "update": 16,
    }
    assert {name: use.peak_bytes for name, use in times.phases.items()} == {
        "rollout": 50,
        "reward": 30,
        "update": 10,
    }


def test_a_step_begins_where_the_last_one_ended(clock: _Clock, timer: PhaseTimer) -> None:
    with timer("update"):
        clock.now_s += 3
    timer.finish_step()
    clock.now_s += 1
    second = timer.finish_step()
    assert (second.step_s, second.phases) == (1.0, {})


def test_an_excluded_block_belongs_to_no_step(clock: _Clock, timer: PhaseTimer) -> None:
    with timer("reshard"):
        clock.now_s += 1
    with timer.excluded():
        clock.now_s += 50
    with timer("generate"):
        clock.now_s += 2
    times = timer.finish_step()
    assert times.step_s == 3 == sum(use.seconds for use in times.phases.values())
    clock.now_s += 4
    assert timer.finish_step().step_s == 4, "only the step of the block is shortened"


def test_a_phase_that_raises_is_closed(clock: _Clock, timer: PhaseTimer) -> None:
    with pytest.raises(KeyError), timer("outer"), timer("inner"):
        clock.now_s += 2
        raise KeyError
    clock.now_s += 5
    times = timer.finish_step()
    assert {name: use.seconds for name, use in times.phases.items()} == {"outer": 0, "inner": 2}


def test_device_work_is_waited_for_at_every_border(device: _Device, timer: PhaseTimer) -> None:
    with timer("forward"):
        device.queued_s = 7.0
    with timer("read_result"):
        device.synchronize()
    phases = timer.finish_step().phases
    assert (phases["forward"].seconds, phases["read_result"].seconds) == (7, 0)


def test_metrics_carry_their_reduction(clock: _Clock, timer: PhaseTimer) -> None:
    with timer("update"):
        clock.now_s += 2
    assert timer.finish_step().metrics() == {
        "time/step_s": Mean(2, 1),
        "time/update_s": Mean(2, 1),
        "time_max/update_s": Max(2),
        "memory/update_peak_bytes": Max(10),
    }


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_peak_memory_sees_a_real_allocation() -> None:
    gc.collect()  # what other tests left must not leave while this one measures
    reset_peak_bytes()
    before = peak_bytes()
    # Pages of its own: the allocator may hand out memory that is resident already.
    with mmap.mmap(-1, 64 << 20) as block:
        for page in range(0, len(block), 4 << 10):
            block[page] = 1
        assert peak_bytes() - before > 48 << 20
    reset_peak_bytes()
    assert peak_bytes() - before < 16 << 20
