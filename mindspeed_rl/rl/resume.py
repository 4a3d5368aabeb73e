"""Stopping and resuming an RL run: what a checkpoint holds besides the policy."""

from __future__ import annotations

from typing import Any

from mindspeed_rl.memory.owners import CRITIC_OWNERS, Owner
from mindspeed_rl.phases.machine import Phase
from mindspeed_rl.rl import batches as rl_samples
from mindspeed_rl.rl import checkpoints
from mindspeed_rl.rl.build import RLJob
from mindspeed_rl.rl.dynamic_sampling import keep_surplus, restored_surplus, surplus_state
from mindspeed_rl.rl.report import Report
from mindspeed_rl.trainer.train_engine import TrainEngine


def start(run: RLJob) -> Report:
    """Restore ``--load`` into the run, if given, and open its report. Collective: the world.

    The engine is not touched: it has no weights yet, so the first sync brings the restored ones
    whatever their version.

    Raises:
        ValueError: the prompts are not those of the checkpoint.
    """
    run.phases.require(Phase.TRAIN, "load")
    with run.phases.resident(*CRITIC_OWNERS, Owner.REFERENCE):
        loaded = checkpoints.load(run.job, run.policy, companions(run))
    if not loaded.extra:
        return Report(run)
    run.sampler.load_state_dict(
        loaded.extra["sampler"],
        allow_changed_data=run.config.checkpoint.allow_changed_data,
    )
    run.version = loaded.extra["version"]
    if run.config.kl.rl_kl_target:
        run.kl_beta = loaded.extra["kl_beta"]
    if run.sampler.fingerprint == loaded.extra["sampler"]["fingerprint"]:
        num_groups = run.plan.engine.num_groups
        run.cache.begin_step(loaded.step)
        saved_groups = loaded.extra.get("num_groups", 0)  # 0: a checkpoint that does not say
        carried = restored_surplus(loaded.extra["surplus"], loaded.step, num_groups, saved_groups)
        keep_surplus(run, *carried, loaded.extra["num_pending"])
        run.lengths.load_state_dict(loaded.extra["lengths"])
    return Report(run, loaded.step, loaded.extra["report"])


def save_if_due(run: RLJob, report: Report, step: int) -> None:
    """Save the state after ``step`` when ``--save-interval`` or the end asks for it. Collective."""
    if not checkpoints.save_is_due(run.job, step):
        return
    run.phases.require(Phase.TRAIN, "save")
    carried = [*run.surplus, *run.pending]
    responses = rl_samples.fetch(run, [s for group in carried for s in group])
    extra: dict[str, Any] = {
        "sampler": run.sampler.state_dict(),
        "version": run.version,
        "kl_beta": run.kl_beta,
        "surplus": surplus_state(carried if run.rank == 0 else [], responses),
        "num_pending": len(run.pending),
        "num_groups": run.plan.engine.num_groups,
        "lengths": run.lengths.state_dict(),
        "report": report.state_dict(),
    }
    with run.phase("save"), run.phases.resident(*CRITIC_OWNERS, Owner.REFERENCE):
        checkpoints.save(run.job, run.policy, step, extra, companions(run))


def companions(run: RLJob) -> dict[str, TrainEngine]:
    """The models beside the policy that change, by role."""
    found = {"critic": run.critic} if run.critic is not None else {}
    if run.reference is not None and run.config.rl.ref_update_interval:
        found["reference"] = run.reference
    return found
