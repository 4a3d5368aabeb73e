"""The learning rate of every update, and of a resumed run."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mindspeed_rl.config import ParallelConfig, TrainConfig
from mindspeed_rl.trainer import optimizer
from mindspeed_rl.trainer.optimizer import LearningRateSchedule


def curve(num_updates: int, **flags: object) -> list[float]:
    schedule = LearningRateSchedule(TrainConfig(**flags), num_updates)  # type: ignore[arg-type]
    return [schedule.advance() for _ in range(num_updates)]


def test_constant_after_warm_up() -> None:
    rates = curve(6, lr=1.0, lr_warmup_iters=4)
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_linear_decay_ends_at_the_minimum_and_stays() -> None:
    rates = curve(8, lr=1.0, min_lr=0.1, lr_decay_style="linear", lr_decay_iters=5)
    assert rates == pytest.approx([0.82, 0.64, 0.46, 0.28, 0.1, 0.1, 0.1, 0.1])


def test_cosine_decay() -> None:
    rates = curve(10, lr=2.0, lr_decay_style="cosine", lr_warmup_fraction=0.2)
    assert rates[:2] == pytest.approx([1.0, 2.0])
    wanted = [1.0 + math.cos(math.pi * i / 8) for i in range(1, 9)]
    assert rates[2:] == pytest.approx(wanted, abs=1e-12)


def test_the_horizon_is_all_updates_of_the_run() -> None:
    assert curve(4, lr=1.0, lr_decay_style="linear") == pytest.approx([0.75, 0.5, 0.25, 0.0])


def test_a_resumed_run_continues_the_curve() -> None:
    flags = TrainConfig(lr=1.0, min_lr=0.1, lr_decay_style="cosine", lr_warmup_iters=3)
    whole = LearningRateSchedule(flags, 20)
    uninterrupted = [whole.advance() for _ in range(20)]
    resumed = LearningRateSchedule(flags, 20)
    resumed.num_updates = 7
    assert [resumed.advance() for _ in range(13)] == uninterrupted[7:]


def test_every_flag_reaches_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """All values differ from each other and from megatron-core's defaults."""
    flags = {"lr": 3e-4, "min_lr": 2e-5, "weight_decay": 0.03, "adam_beta1": 0.8,
             "adam_beta2": 0.96, "adam_eps": 1e-7, "clip_grad": 0.7}  # fmt: skip
    seen: list[Any] = []
    monkeypatch.setattr(
        optimizer, "get_megatron_optimizer", lambda config, models, **_: seen.append(config)
    )
    train = TrainConfig(**flags)  # type: ignore[arg-type]
    optimizer.build_optimizer([], train, ParallelConfig())
    (config,) = seen
    assert {name: getattr(config, name) for name in flags} == flags
    assert config.optimizer == "adam" and not config.bf16
