"""Decides on all ranks together when a run saves or ends, and which checkpoints it keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mindspeed_rl.checkpoint.retention import keep
from mindspeed_rl.checkpoint.save_clock import Due, SaveClock, Votes, due_after, votes_are_taken
from mindspeed_rl.core import stop_request
from mindspeed_rl.metrics.loggers import RunLogger
from mindspeed_rl.parallel.small_collectives import all_reduce_sum

if TYPE_CHECKING:
    from mindspeed_rl.launch.job import Job
    from mindspeed_rl.planning.run_plan import RunPlan


def decide(job: Job[Any, RunPlan], clock: SaveClock, step: int) -> Due:
    """Decide what happens after ``step``, the same on all ranks.

    Collective: the world, where flags ask for saves by time or signal; else local. The step ends
    here for ``clock``.
    """
    options = job.config.checkpoint
    clock.end_step()
    votes = Votes()
    if votes_are_taken(options):
        mine = clock.votes(options, asked=stop_request.is_asked(), keeps_time=job.world.rank == 0)
        votes = Votes(*all_reduce_sum(torch.tensor(mine)).tolist())
    return due_after(options, job.config.train.train_iters, step, votes)


def stopped_line(job: Job[Any, RunPlan], step: int, reason: str) -> str:
    """Return the line of a run that ends before its last step."""
    save = job.config.checkpoint.save
    where = f"its checkpoint is in {save}, and --load continues there" if save else "without --save"
    return f"stopped after step {step} of {job.config.train.train_iters}: {reason}; {where}"


def keep_checkpoints(job: Job[Any, RunPlan], logger: RunLogger) -> None:
    """Remove the checkpoints that the flags do not keep. Local; rank 0 does it."""
    if job.world.rank != 0:
        return
    options = job.config.checkpoint
    kept = keep(options, logger.watched_values)
    if kept.removed:
        job.log_rank0(kept.removed_line)
    if kept.missing:
        job.log_rank0(
            f"warning: --save-best-metric {kept.missing}: no step with a checkpoint has logged it, "
            "so that none is known as the best; its names are those of metrics.jsonl"
        )
