"""RL entry: ``torchrun ... -m mindspeed_rl.train_rl``. :func:`train` shows the whole step.

With ``--orchestrator ray``, run ``python -m mindspeed_rl.train_rl`` once instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.launch.entry import run_entry
from mindspeed_rl.launch.job import Job
from mindspeed_rl.planning.run_plan import RLPlan, plan_rl

if TYPE_CHECKING:
    from mindspeed_rl.rl.components import Components


def train(run: Components) -> None:
    """Run the loop: prompts -> rollouts -> rewards -> advantages -> update -> weight sync."""
    from mindspeed_rl.rl import resume
    from mindspeed_rl.rl.advantages import compute_advantages
    from mindspeed_rl.rl.batches import build_batches
    from mindspeed_rl.rl.logprobs import compute_logprobs
    from mindspeed_rl.rl.reward_model import add_model_scores
    from mindspeed_rl.rl.rollouts import generate_rollouts
    from mindspeed_rl.rl.sync import check_engine, sync_weights
    from mindspeed_rl.rl.update import refresh_reference, update

    state, report = resume.start(run)
    check_engine(run, state)
    run.telemetry.timer.finish_step()  # the start-up belongs to no step
    for step in range(state.step + 1, run.config.train.train_iters + 1):
        state.step = step
        run.telemetry.profiler.begin_step(step)
        run.scheduler.to_sync()
        synced = sync_weights(run, state.version)
        run.scheduler.to_rollout()
        report.evaluate_if_due(step - 1)
        rollouts = generate_rollouts(run, state)
        run.scheduler.to_train()
        with run.phase("train"):
            batches = build_batches(run, rollouts.samples)
            scored = add_model_scores(run, rollouts, batches.placed)
            samples, greedy = scored.samples, scored.greedy_rewards
            batches = compute_logprobs(run, state, batches, samples)
            batches = compute_advantages(run, state, batches, samples, greedy)
            with run.phase("update"):
                metrics = update(run, state, batches)
            refresh_reference(run.models, run.scheduler, run.config.rl.ref_update_interval, step)
        report.log_step(scored, metrics.merge(synced), batches.placed)
        resume.save_if_due(run, state, report)
    # The last evaluation samples with the weights of the last update.
    run.scheduler.to_sync()
    sync_weights(run, state.version)
    run.scheduler.to_rollout()
    report.finish(run.models)


def main(job: Job[RLRunConfig, RLPlan]) -> None:
    """Build the parts of the run, train, evaluate, and write the results."""
    from mindspeed_rl.rl.build import build_components
    from mindspeed_rl.rl.report import describe
    from mindspeed_rl.selftest import loss as selftest

    if job.config.rl.rl_selftest == "loss":
        selftest.check(job)
        return
    run = build_components(job)
    try:
        describe(run)
        train(run)
    finally:
        run.close()


if __name__ == "__main__":
    run_entry("mindspeed_rl.train_rl", RLRunConfig, plan_rl, main)
