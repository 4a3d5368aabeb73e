"""RL entry: ``torchrun ... -m mindspeed_rl.train_rl``. :func:`train_step` shows the whole step.

With ``--orchestrator ray``, run ``python -m mindspeed_rl.train_rl`` once instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.process_end import end_process
from mindspeed_rl.launch.entry import run_entry
from mindspeed_rl.launch.job import Job
from mindspeed_rl.planning.run_plan import RLPlan, plan_rl

if TYPE_CHECKING:
    from mindspeed_rl.rl.components import Components, RunState
    from mindspeed_rl.rl.report import RunReporter


def train(run: Components) -> None:
    """Run the loop of all steps, from the last checkpoint of ``--load``."""
    from mindspeed_rl.core.alarms import Rollback
    from mindspeed_rl.launch.attempt import mark, note_step
    from mindspeed_rl.launch.start_up import stage
    from mindspeed_rl.peers.saving import keep_checkpoints
    from mindspeed_rl.replay.rollback import roll_back
    from mindspeed_rl.rl import resume
    from mindspeed_rl.rl.export import export_if_due
    from mindspeed_rl.rl.sync import check_engine, sync_weights

    mark("engines")
    with stage(run.job.log_rank0, "state to start from"):
        state, report = resume.start(run)
    mark("loaded")
    with stage(run.job.log_rank0, "first weight update, and log-probs compared"):
        check_engine(run, state)
    run.telemetry.timer.finish_step()  # the start-up belongs to no step
    run.save_clock.begin_steps()
    while state.step < run.config.train.train_iters:
        note_step(state.step + 1)
        try:
            train_step(run, state, report, state.step + 1)
        except Rollback as alarm:
            state, report = roll_back(run, state, report, alarm)
            continue
        mark("stepped")
        export_if_due(run.job, run.models.policy, state.step, run.telemetry.timer)
        if stop := resume.save_if_due(run, state, report):
            report.stop(stop)
            return
    # The last evaluation samples with the weights of the last update.
    run.scheduler.to_sync()
    sync_weights(run, state.version)
    run.scheduler.to_rollout()
    report.finish(run.models)
    resume.finish_saves(run)
    if run.peers is not None:
        run.peers.wait()
    keep_checkpoints(run.job, run.telemetry.logger)  # the last evaluation may name another best


def train_step(run: Components, state: RunState, report: RunReporter, step: int) -> None:
    """Run a step: prompts -> rollouts -> rewards -> advantages -> update -> metrics."""
    from mindspeed_rl.rl.advantages import compute_advantages
    from mindspeed_rl.rl.batches import build_batches
    from mindspeed_rl.rl.expert_placement import balance_experts
    from mindspeed_rl.rl.logprobs import compute_logprobs
    from mindspeed_rl.rl.reward_model import add_model_scores
    from mindspeed_rl.rl.rollouts import generate_rollouts
    from mindspeed_rl.rl.sync import sync_weights
    from mindspeed_rl.rl.update import refresh_reference, update

    state.step = step
    run.telemetry.profiler.begin_step(step)
    run.scheduler.to_sync()
    synced = sync_weights(run, state.version)
    run.scheduler.to_rollout()
    shared = report.evaluate_if_due(step - 1)
    rollouts = generate_rollouts(run, state, shared)
    report.end_evaluation(shared)
    balance = balance_experts(run, state)
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
    report.log_step(scored, metrics.merge(synced).merge(balance), batches.placed)


def main(job: Job[RLRunConfig, RLPlan]) -> None:
    """Build the parts of the run, train, evaluate, and write the results."""
    from mindspeed_rl.replay.run import check, replay
    from mindspeed_rl.rl.build import build_components
    from mindspeed_rl.rl.report import describe
    from mindspeed_rl.selftest import loss as selftest

    if job.config.rl.rl_selftest == "loss":
        selftest.check(job)
        return
    replays = job.config.replay.active
    if replays:
        check(job)
    run = build_components(job)
    try:
        describe(run)
        if replays:
            replay(run, train_step)
        else:
            train(run)
    finally:
        run.close()


if __name__ == "__main__":
    run_entry("mindspeed_rl.train_rl", RLRunConfig, plan_rl, main)
    end_process()
