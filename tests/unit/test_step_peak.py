"""The largest moment of an update is measured and predicted where it is asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from mindspeed_rl.orchestration.step_peak import MEASURED, PREDICTED, watch_update
from support.batches import local_batches
from support.rl_run import make_run

from mindspeed_rl.memory.prediction import predict
from mindspeed_rl.memory.training import Workload
from mindspeed_rl.observability.metrics import MetricSet
from mindspeed_rl.rl.build import RLJob
from mindspeed_rl.samples.packing import MicroBatch, TrainSample

KEPT = 4096


def batches_of(run: RLJob, length: int = 8) -> list[MicroBatch]:
    samples = [TrainSample(i, torch.arange(4, 4 + length), 3, None, 1.0) for i in range(4)]
    return local_batches(run.job, run.policy, samples)


def watched(run: RLJob) -> MetricSet:
    with watch_update(run, batches_of(run)) as found:
        kept = torch.zeros(KEPT, dtype=torch.uint8)
        del kept
        torch.zeros(KEPT // 4, dtype=torch.uint8)
    return found


def test_on_a_cpu_the_steps_of_the_flag_are_measured(tmp_path: Path) -> None:
    run = make_run(tmp_path, "--memory-peak-interval 3")
    seen = []
    for turn in range(1, 8):
        run.num_steps = turn
        found = watched(run)
        if found:
            assert found[MEASURED].value == KEPT and found[PREDICTED].value > KEPT
            seen.append(turn)
    assert seen == [1, 4, 7]


def test_without_the_flag_nothing_is_watched(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.num_steps = 1
    assert watched(run) == MetricSet()


def test_an_allocator_that_counts_is_read_at_every_step(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    batches = batches_of(run)
    platform = SimpleNamespace(name="cuda", watch_peak=lambda: lambda: 12345)
    run.job = replace(run.job, platform=cast(Any, platform))
    with watch_update(run, batches) as found:
        assert not found, "the block has not ended"
    assert found[MEASURED].value == 12345 and found[PREDICTED].value > 0


def test_the_prediction_is_that_of_the_micro_batches_of_the_step(tmp_path: Path) -> None:
    """Two samples in each of two; three tokens of each are a prompt."""
    run = make_run(tmp_path, "--memory-peak-interval 1")
    run.num_steps = 1
    training_memory = predict(run.config, run.plan).training
    for length in (6, 12):
        batches = batches_of(run, length)
        with watch_update(run, batches) as found:
            pass
        trained = max(int(b.loss_mask.sum()) for b in batches)
        work = Workload(2 * length, length, trained, num_micro_batches=2)
        assert trained == 2 * (length - 3)
        assert found[PREDICTED].value == training_memory.peak(0, work).in_step


class FakeRuntime:
    """Of CUDA: what is registered."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def test_pinned_memory_is_as_large_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch rounds up to 8192 here; it is given back when nobody holds it any more."""
    from mindspeed_rl.platforms.cuda import CudaPlatform

    runtime, codes = FakeRuntime(), []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", codes.append)
    buffer = CudaPlatform().host_buffer(5000)
    assert runtime.registered == {buffer.data_ptr(): 5000} and codes == [0]
    assert buffer.untyped_storage().nbytes() == 5000
    del buffer
    assert runtime.registered == {}
