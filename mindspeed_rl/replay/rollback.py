"""Takes a run back to an earlier checkpoint of its own when an alarm asks for that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from mindspeed_rl.checkpoint.resume import LEFT, checkpoints_of, set_aside
from mindspeed_rl.core.alarms import Rollback
from mindspeed_rl.rl.components import Components, RunState
from mindspeed_rl.rl.report import RunReporter
from mindspeed_rl.rl.resume import finish_saves, start


def roll_back(
    run: Components, state: RunState, report: RunReporter, asked: Rollback
) -> tuple[RunState, RunReporter]:
    """Return the state and report of the newest sound checkpoint. Collective: the world; in TRAIN.

    Everything is that of the checkpoint, but for the prompts: those drawn since then are passed
    over, so that the steps are done again with others. Checkpoints of the steps that the rule
    counted are set aside, and what was logged since the checkpoint is dropped as at a resume.

    Raises:
        RuntimeError: There is no earlier checkpoint, or the run went back to it before.
        UsageError: None of the earlier checkpoints is sound.
    """
    options = run.config.checkpoint
    finish_saves(run)
    report.close()
    root = Path(options.save)
    earlier = checkpoints_of(root, asked.before) if root.is_dir() else []
    dist.barrier()  # all ranks have looked
    if not earlier:
        raise RuntimeError(
            f"{asked} ends the run: --save {options.save} has no checkpoint of a step before "
            f"{asked.before}"
        )
    if run.job.world.rank == 0:
        for path in set(checkpoints_of(root)) - set(earlier):
            set_aside(path, LEFT)
    dist.barrier()
    run.models.policy.discard_gradients()
    run.samples.cache.clear()
    options = replace(
        options, load=options.save, finetune=False, no_load_optim=False, no_load_rng=False
    )
    job = replace(run.job, config=replace(run.config, checkpoint=options))
    restored, again = start(run, job)
    if restored.step in state.rollbacks:
        raise RuntimeError(
            f"{asked} ends the run: it went back to step {restored.step} before and came no "
            "further; lower --lr, look at the data of these steps, or --load an earlier checkpoint"
        )
    restored.sampler.load_state_dict(state.sampler.state_dict())
    restored.rollbacks = (*state.rollbacks, restored.step)
    run.telemetry.timer.finish_step()  # the time since the last step belongs to none
    run.save_clock.begin_steps()
    run.job.log_rank0(
        f"warning: {asked}: back to step {restored.step}; the prompts since then are passed over"
    )
    return restored, again
