"""Builds the optimizer of a TrainEngine and computes its learning rates."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from mindspeed_rl.config import ParallelConfig, TrainConfig
from mindspeed_rl.trainer.patches import swapped_optimizer


class LearningRateSchedule:
    """Linear warm-up, then constant, linear or cosine decay; counts optimizer updates.

    Update ``n`` (from 1) uses ``lr * n / warmup`` during warm-up. After the decay steps the rate
    stays at ``--min-lr``. The number of updates is the only state, so a resumed run follows the
    curve of the uninterrupted run.
    """

    def __init__(self, train: TrainConfig, num_updates: int) -> None:
        self.num_updates = 0
        self._train = train
        self.decay = train.lr_decay_iters or max(1, num_updates)
        self.warmup = train.lr_warmup_iters or round(train.lr_warmup_fraction * self.decay)

    def advance(self) -> float:
        """Count one update and return its learning rate."""
        self.num_updates += 1
        return self.at(self.num_updates)

    def at(self, update: int) -> float:
        """Return the learning rate of an update, counted from 1."""
        train = self._train
        if update <= self.warmup:
            return train.lr * update / self.warmup
        if train.lr_decay_style == "constant":
            return train.lr
        span = max(1, self.decay - self.warmup)
        progress = min(1.0, (update - self.warmup) / span)
        share = 1.0 - progress
        if train.lr_decay_style == "cosine":
            share = 0.5 * (1.0 + math.cos(math.pi * progress))
        return train.min_lr + (train.lr - train.min_lr) * share


def build_optimizer(models: list[Any], train: TrainConfig, parallel: ParallelConfig) -> Any:
    """Build megatron-core's AdamW over a model's DistributedDataParallel chunks. Collective."""
    swapped_optimizer.apply()
    dtype = torch.bfloat16 if train.bf16 else torch.float32
    config = OptimizerConfig(
        optimizer="adam",
        lr=train.lr,
        min_lr=train.min_lr,
        weight_decay=train.weight_decay,
        adam_beta1=train.adam_beta1,
        adam_beta2=train.adam_beta2,
        adam_eps=train.adam_eps,
        clip_grad=train.clip_grad,
        bf16=train.bf16,
        params_dtype=dtype,
        use_distributed_optimizer=parallel.use_distributed_optimizer,
    )
    return get_megatron_optimizer(config, models, use_gloo_process_groups=False)


def torch_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the torch optimizers inside a (possibly chained) megatron-core optimizer."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in chained]
