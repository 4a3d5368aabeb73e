"""RL entry: ``torchrun ... -m mindspeed_rl.train_rl``. The step, whole, is :func:`train`.

With ``--orchestrator ray`` it is ``python -m mindspeed_rl.train_rl``, once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.config.validate import RLPlan, check_rl
from mindspeed_rl.orchestration.stages import SampleIds, Stage, run_through
from mindspeed_rl.orchestration.torchrun import Job, run_entry

if TYPE_CHECKING:
    from mindspeed_rl.rl.build import RLJob


def train(run: RLJob) -> Iterator[Stage]:
    """prompts -> rollout -> reward -> advantage -> train -> reshard -> rollout.

    Yields before every stage; going on is its driver's decision.
    """
    from mindspeed_rl.rl import advantages as rl_batch
    from mindspeed_rl.rl import resume as rl_resume
    from mindspeed_rl.rl import reward_model as rl_reward_model
    from mindspeed_rl.rl import update as rl_step

    report = rl_resume.start(run)
    rl_step.probe(run)
    run.timer.restart()
    for step in range(report.start + 1, run.config.train.train_iters + 1):
        yield Stage("rollout", step)
        run.profiler.begin_step(step)
        run.phases.to_rollout(run.version)
        report.evaluate_if_due(step - 1)
        rollouts = rl_step.collect(run, step)
        yield Stage("train", step, SampleIds.of(s.sample_id for s in rollouts.samples))
        run.phases.to_train()
        with run.phase("train"):
            batches = rl_batch.build_batches(run, rollouts.samples)
            rollouts = rl_reward_model.add_scores(run, rollouts, batches)
            batches = rl_batch.annotate(run, batches, rollouts.samples)
            batches = rl_batch.with_advantages(
                run, batches, rollouts.samples, step, rollouts.greedy
            )
            warmup = step <= run.config.critic.critic_warmup_steps
            metrics = rl_step.update(run, batches, critic_only=warmup)
            rl_step.refresh_reference(run, step)
        metrics = metrics.merge(rollouts.metrics)
        report.log_step(step, rollouts.drawn, metrics, batches.placed)
        rl_resume.save_if_due(run, report, step)
    yield Stage("finish", run.config.train.train_iters)
    run.phases.to_rollout(run.version)
    report.finish()


def stages(job: Job[RLRunConfig, RLPlan]) -> Iterator[Stage]:
    """Build the run, train, evaluate, write the results; the first stage follows the building."""
    from mindspeed_rl.rl import report as rl_report
    from mindspeed_rl.rl import selftest
    from mindspeed_rl.rl.build import build_rl_job

    if job.config.rl.rl_selftest == "loss":
        selftest.check(job)
        return
    run = build_rl_job(job)
    try:
        rl_report.describe(run)
        yield from train(run)
    finally:
        run.close()


def main(job: Job[RLRunConfig, RLPlan]) -> None:
    """All stages, without a pause."""
    run_through(stages(job))


if __name__ == "__main__":
    run_entry("mindspeed_rl.train_rl", RLRunConfig, check_rl, main)
