"""RL entry: ``torchrun ... -m mindspeed_rl.train_rl``. The step, whole, is :func:`train`.

With ``--orchestrator ray`` it is ``python -m mindspeed_rl.train_rl``, once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.config.validate import RLPlan, check_rl
from mindspeed_rl.launch.entry import run_entry
from mindspeed_rl.launch.job import Job

if TYPE_CHECKING:
    from mindspeed_rl.orchestration.rl_job import RLJob


def train(run: RLJob) -> None:
    """prompts -> rollout -> reward -> advantage -> train -> reshard -> rollout."""
    from mindspeed_rl.orchestration import rl_batch, rl_resume, rl_reward_model, rl_step

    report = rl_resume.start(run)
    rl_step.probe(run)
    run.timer.restart()
    for step in range(report.start + 1, run.config.train.train_iters + 1):
        run.profiler.begin_step(step)
        run.phases.to_rollout(run.version)
        report.evaluate_if_due(step - 1)
        rollouts = rl_step.collect(run, step)
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
    run.phases.to_rollout(run.version)
    report.finish()


def main(job: Job[RLRunConfig, RLPlan]) -> None:
    """Build the run, train, evaluate and write the results."""
    from mindspeed_rl.orchestration import rl_report, selftest
    from mindspeed_rl.orchestration.rl_job import build_rl_job

    if job.config.rl.rl_selftest == "loss":
        selftest.check(job)
        return
    run = build_rl_job(job)
    try:
        rl_report.describe(run)
        train(run)
    finally:
        run.close()


if __name__ == "__main__":
    run_entry("mindspeed_rl.train_rl", RLRunConfig, check_rl, main)
