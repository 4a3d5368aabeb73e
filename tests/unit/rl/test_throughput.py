"""Tokens, seconds and operations of a step as its report puts them together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.rl_run import COUNTS, PROMPTS, make_run

from mindspeed_rl.metrics.throughput import devices_of
from mindspeed_rl.models.flops import training_flops
from mindspeed_rl.rl.throughput import passes, step_throughput

SECONDS = {
    "time/step_s": 8.0, "time/generate_s": 2.0, "time/tail_s": 0.25, "time/reward_s": 0.5,
    "time/wait_s": 1.25, "time/train_s": 3.0, "time/update_s": 2.5,
}  # fmt: skip


def test_each_part_has_its_own_tokens_and_seconds(tmp_path: Path) -> None:
    """Two passes over the samples, one of whose four optimizer steps had nothing to train on."""
    run = make_run(tmp_path, "--grpo-iterations 2 --global-batch-size 3")
    rollouts = run.generate()
    values = SECONDS | {"optimizer/skipped": 1.0}
    found = step_throughput(run.parts.job, run.parts.samples, rollouts, 1, values)
    response = sum(COUNTS)
    total = response + sum(len(PROMPTS[s.prompt_index].token_ids) for s in rollouts.samples)
    assert found["throughput/tokens_per_s"] == response / 8.0
    assert found["throughput/all_tokens_per_s"] == total / 8.0
    assert found["throughput/rollout_tokens_per_s"] == response / 4.0
    assert found["throughput/update_all_tokens_per_s"] * 2.5 == pytest.approx(1.5 * total, abs=1)
    lengths = [len(PROMPTS[s.prompt_index].token_ids) + s.num_tokens for s in rollouts.samples]
    flops = 1.5 * training_flops(run.parts.plan.spec, lengths)
    assert found["throughput/update_tflops_per_device"] == pytest.approx(flops / 2.5 / 1e12)
    assert "throughput/update_mfu" not in found, "nobody knows the peak of a CPU"


def test_carried_samples_count_where_they_are_trained_on(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    rollouts = run.generate()
    fewer = replace(rollouts, generated=rollouts.samples[:2])
    found = step_throughput(run.parts.job, run.parts.samples, fewer, 1, SECONDS)
    assert found["throughput/rollout_tokens_per_s"] == sum(COUNTS[:2]) / 4.0
    assert found["throughput/update_tokens_per_s"] == sum(COUNTS) / 2.5


def test_in_the_critics_warm_up_only_the_critic_works(tmp_path: Path) -> None:
    flags = "--rl-advantage-estimator gae --critic-warmup-steps 2"
    job = make_run(tmp_path, flags).parts.job
    assert passes(job, 2, 0.0) == (0.0, 1.0)
    assert passes(job, 3, 0.0) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("flags", "peak"),
    [("", None), ("--bf16", 376.0), ("--device-peak-tflops 90", 90.0)],
)
def test_the_peak_is_of_the_precision_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, peak: float | None
) -> None:
    job = make_run(tmp_path, flags).parts.job
    monkeypatch.setattr(type(job.platform), "device_name", "Ascend910_9382")
    devices = devices_of(job.config, job.plan.parallel.world, job.platform.device_name)
    assert (devices.count, devices.per_card, devices.peak_tflops) == (1, 2, peak)
