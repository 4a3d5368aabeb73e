"""Loads a run from its training checkpoint, and saves one when it is due."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mindspeed_rl.checkpoint.background import BackgroundWriter
from mindspeed_rl.checkpoint.full_disk import named_disk
from mindspeed_rl.checkpoint.resume import refuse_other_run, set_aside, sweep
from mindspeed_rl.checkpoint.shared_storage import check_listed, check_written
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.trainer.train_engine import TrainEngine
from mindspeed_rl.trainer_state.checkpoint import (
    LoadedState,
    estimated_bytes,
    load_checkpoint,
    plan_checkpoint,
)

if TYPE_CHECKING:
    from mindspeed_rl.config.training import CheckpointConfig
    from mindspeed_rl.launch.job import Job
    from mindspeed_rl.planning.run_plan import RunPlan


def load(
    job: Job[Any, RunPlan],
    engine: TrainEngine,
    companions: Mapping[str, TrainEngine] = MappingProxyType({}),
    before: int | None = None,
) -> LoadedState:
    """Load ``--load``'s newest checkpoint; without one, start at step 0. Collective: the world.

    With ``before`` only checkpoints of earlier steps than that are taken.

    Raises:
        UsageError: ``--load`` cannot be resumed from, ``--save`` belongs to another run, or one of
            them is not the same folder on all nodes.
    """
    options = job.config.checkpoint
    loaded = LoadedState(0, {})
    if options.load:
        check_listed(options.load)
        with job.watchdog.phase("load"):
            loaded = load_checkpoint(options.load, engine, options, companions, before)
    job.log_rank0(*loaded.notes)
    last = job.config.train.train_iters
    if loaded.step > last:
        raise UsageError(
            f"--load {options.load} is at step {loaded.step}, past --train-iters {last}; raise "
            "--train-iters to train on"
        )
    if options.save:
        check_written(options.save, writes=job.world.local_rank == 0)
        if job.world.rank == 0:
            for path in loaded.damaged:
                if path.parent.resolve() == Path(options.save).resolve():
                    job.log_rank0(f"{path} is renamed to {set_aside(path).name}")
            refuse_other_run(options.save, loaded.step)
            job.log_rank0(
                *(f"removed {path}: its save did not finish" for path in sweep(options.save))
            )
        dist.barrier()
    return loaded


def save(
    job: Job[Any, RunPlan],
    engine: TrainEngine,
    step: int,
    extra: Mapping[str, Any],
    companions: Mapping[str, TrainEngine] = MappingProxyType({}),
    writer: BackgroundWriter | None = None,
) -> None:
    """Save the state after ``step``. Collective: the world.

    With a writer only the copy of the state is made here, after the checkpoint before is written.
    """
    options = job.config.checkpoint
    finish_writing(job, writer, wait=True)
    needed = sum(
        estimated_bytes(model, not options.no_save_optim)
        for model in (engine, *companions.values())
    )
    with named_disk(options.save, step, needed):
        unwritten = plan_checkpoint(
            options.save,
            step,
            engine,
            extra,
            with_optimizer=not options.no_save_optim,
            with_rng=not options.no_save_rng,
            companions=companions,
        )
        if writer is None:
            unwritten.check_values()
            job.log_rank0(f"saved {unwritten.write()}")
        else:
            writer.start(unwritten)


def open_writer(options: CheckpointConfig) -> BackgroundWriter | None:
    """Return the writer of ``--async-save``; ``None`` without it. Collective: the world."""
    return BackgroundWriter() if options.save and options.async_save else None


def finish_writing(
    job: Job[Any, RunPlan], writer: BackgroundWriter | None, *, wait: bool = False
) -> None:
    """Tell of the checkpoint that was written meanwhile, if there is one. Local.

    Args:
        job: Job of the run.
        writer: Writer of the run; ``None``: there is nothing to tell.
        wait: Whether to wait for the checkpoint that is being written.

    Raises:
        FloatingPointError: Its values are not finite.
        OSError, UsageError: It could not be written.
    """
    if writer is not None and (path := writer.wait() if wait else writer.poll()):
        job.log_rank0(f"saved {path}")
