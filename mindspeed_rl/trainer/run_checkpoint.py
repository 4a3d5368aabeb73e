"""Loads a run from its training checkpoint, and saves one when it is due."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mindspeed_rl.checkpoint.resume import refuse_other_run
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.trainer.checkpoint import LoadedState, load_checkpoint, save_checkpoint
from mindspeed_rl.trainer.train_engine import TrainEngine

if TYPE_CHECKING:
    from mindspeed_rl.config.training import CheckpointConfig
    from mindspeed_rl.launch.job import Job
    from mindspeed_rl.planning.run_plan import RunPlan


def load(
    job: Job[Any, RunPlan],
    engine: TrainEngine,
    companions: Mapping[str, TrainEngine] = MappingProxyType({}),
) -> LoadedState:
    """Load ``--load``'s newest checkpoint; without one, start at step 0. Collective: the world.

    Raises:
        UsageError: ``--load`` cannot be resumed from, or ``--save`` belongs to another run.
    """
    options = job.config.checkpoint
    loaded = LoadedState(0, {})
    if options.load:
        with job.watchdog.phase("load"):
            loaded = load_checkpoint(options.load, engine, options, companions)
    job.log_rank0(*loaded.notes)
    last = job.config.train.train_iters
    if loaded.step > last:
        raise UsageError(
            f"--load {options.load} is at step {loaded.step}, past --train-iters {last}; raise "
            "--train-iters to train on"
        )
    if options.save:
        if job.world.rank == 0:
            refuse_other_run(options.save, loaded.step)
        dist.barrier()
    return loaded


def save_is_due(options: CheckpointConfig, train_iters: int, step: int) -> bool:
    """Whether ``--save`` wants the state after ``step``: every interval, and at the end."""
    if not options.save:
        return False
    at_interval = options.save_interval > 0 and step % options.save_interval == 0
    return at_interval or step == train_iters


def save(
    job: Job[Any, RunPlan],
    engine: TrainEngine,
    step: int,
    extra: Mapping[str, Any],
    companions: Mapping[str, TrainEngine] = MappingProxyType({}),
) -> None:
    """Save the state after ``step``. Collective: the world."""
    options = job.config.checkpoint
    path = save_checkpoint(
        options.save,
        step,
        engine,
        extra,
        with_optimizer=not options.no_save_optim,
        with_rng=not options.no_save_rng,
        companions=companions,
    )
    job.log_rank0(f"saved {path}")
