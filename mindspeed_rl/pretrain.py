"""Supervised entry: ``torchrun ... -m mindspeed_rl.pretrain``: fine-tuning and pretraining."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from mindspeed_rl.config import PretrainRunConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.process_end import end_process
from mindspeed_rl.launch.entry import run_entry
from mindspeed_rl.launch.job import Job
from mindspeed_rl.launch.start_up import stage, start_stage
from mindspeed_rl.planning.run_plan import RunPlan, plan_pretrain

if TYPE_CHECKING:
    from mindspeed_rl.checkpoint.background import BackgroundWriter
    from mindspeed_rl.checkpoint.save_clock import Due
    from mindspeed_rl.data.batches import StepSamples, SupervisedSamples
    from mindspeed_rl.data.supervised import SupervisedDataset
    from mindspeed_rl.metrics.timers import PhaseTimer
    from mindspeed_rl.peers.copies import PeerCopies
    from mindspeed_rl.trainer.indexed_data import IndexedSamples
    from mindspeed_rl.trainer.train_engine import TrainEngine

    SampleSource = SupervisedSamples | IndexedSamples

SftJob = Job[PretrainRunConfig, RunPlan]

# Megatron flags that choose other data or another loss; RL ignores them.
OTHER_DATA = (
    *("--train-data-path", "--valid-data-path", "--test-data-path", "--data-args-path"),
    *("--per-split-data-args-path", "--mock-data", "--fim-data", "--dataloader-type"),
    *("--eod-mask-loss", "--reset-position-ids", "--reset-attention-mask"),
)


def main(job: SftJob) -> None:
    """Train on prompt and solution pairs, or on rows of indexed data."""
    from mindspeed_rl.building.models import build_engine, initialize_parallel
    from mindspeed_rl.checkpoint.save_clock import SaveClock
    from mindspeed_rl.launch.attempt import elapsed_s, mark, note_step
    from mindspeed_rl.metrics.telemetry import (
        log_description,
        named_phase,
        open_logger,
        open_progress,
        open_timer,
    )
    from mindspeed_rl.peers.copies import open_copies
    from mindspeed_rl.peers.saving import decide, keep_checkpoints, stopped_line
    from mindspeed_rl.rl.export import export_if_due
    from mindspeed_rl.trainer_state import run_checkpoint

    train = job.config.train
    if job.config.sft.stage == "pretrain":
        refuse_other_data(job.ignored)
    logger = open_logger(job.config, job.world.rank)
    initialize_parallel(job)
    source = load_source(job)
    with stage(job.log_rank0, "model"):
        engine = build_engine(job, "policy", train.train_iters)
    batches = f"{job.config.sft.stage}: {train.train_iters} steps of {train.global_batch_size}"
    log_description(job, source.report(), batches)
    peers = open_copies(job)
    done = start(job, engine, source, peers)
    timer, profiler = open_timer(job)
    writer = run_checkpoint.open_writer(job.config.checkpoint)
    with closing(logger):
        logger.truncate_after(done)
        progress = open_progress(job.config, done, job.config.sft.stage, job.world.rank)
        timer.finish_step()  # the start-up belongs to no step
        clock, stop = SaveClock(elapsed_s()), ""
        for step in range(done + 1, train.train_iters + 1):
            note_step(step)
            profiler.begin_step(step)
            values = train_step(job, engine, source.next(train.global_batch_size), timer)
            with named_phase(timer, job.watchdog, "log"):
                logger.log(step, values)
                progress.update(step, {"loss": values["loss"], "lr": values["optimizer/lr"]})
            mark("stepped")
            export_if_due(job, engine, step, timer)
            run_checkpoint.finish_writing(job, writer)
            due = decide(job, clock, step)
            keep_state(job, engine, step, source, timer, peers, writer, due)
            if due.save:
                clock.end_save()
                keep_checkpoints(job, logger)
            if stop := due.stop:
                job.log_rank0(stopped_line(job, step, stop))
                break
        with job.watchdog.phase("save"):
            finish_keeping(job, peers, writer)
            keep_checkpoints(job, logger)
        profiler.close()
        progress.close()
    if not stop:
        export(job, engine)


def export(job: SftJob, engine: TrainEngine) -> None:
    """Write the trained model where ``--export-hf`` says. Collective: the world."""
    from mindspeed_rl.rl.export import export_policy

    if target := job.config.checkpoint.export_hf:
        with job.watchdog.phase("export"):
            export_policy(job, engine, target, job.config.train.train_iters)
        job.log_rank0(f"HF checkpoint: {target}")


def start(
    job: SftJob, engine: TrainEngine, source: SampleSource, peers: PeerCopies | None = None
) -> int:
    """Take the state to go on from and the output folder; return the last step that is done.

    The state is that of copies in memory, or of ``--load``. Collective: the world.
    """
    from mindspeed_rl.launch.attempt import mark
    from mindspeed_rl.metrics.output_dir import take_output_dir
    from mindspeed_rl.metrics.run_record import write_run_record
    from mindspeed_rl.trainer_state import run_checkpoint

    mark("engines")
    copied = peers.load({"": engine}) if peers is not None else None
    loaded = copied or run_checkpoint.load(job, engine)
    if loaded.extra:
        source.load_state_dict(
            loaded.extra["sampler"], allow_changed_data=job.config.checkpoint.allow_changed_data
        )
    take_output_dir(
        job.config.logging, job.config.checkpoint.load, job.world.local_rank, loaded.step
    )
    if job.world.rank == 0:
        write_run_record(job, loaded.step)
    mark("loaded")
    return loaded.step


def keep_state(
    job: SftJob,
    engine: TrainEngine,
    step: int,
    source: SampleSource,
    timer: PhaseTimer,
    peers: PeerCopies | None,
    writer: BackgroundWriter | None,
    due: Due,
) -> None:
    """Copy the state after a step where that is due, and save it if asked for. Collective: world.

    Args:
        job: Job of the run.
        engine: Engine of the policy.
        step: Number of steps that are done.
        source: Source of samples, whose position is kept.
        timer: Timer of phases.
        peers: Copies in memory; ``None``: there are none.
        writer: Writer of ``--async-save``.
        due: Whether a checkpoint is due, and whether the run ends.
    """
    from mindspeed_rl.metrics.telemetry import named_phase
    from mindspeed_rl.trainer_state import run_checkpoint

    state = {"sampler": source.state_dict()}
    if peers is not None and peers.is_due(step) and not due.stop:
        with named_phase(timer, job.watchdog, "save"):
            peers.take(step, {"": engine}, state)
    if due.save:
        with named_phase(timer, job.watchdog, "save"):
            run_checkpoint.save(job, engine, step, state, writer=writer)


def finish_keeping(job: SftJob, peers: PeerCopies | None, writer: BackgroundWriter | None) -> None:
    """Wait for the copy and the checkpoint that are still being written. Collective: the world."""
    from mindspeed_rl.trainer_state import run_checkpoint

    if peers is not None:
        peers.wait()
    run_checkpoint.finish_writing(job, writer, wait=True)


def train_step(
    job: SftJob, engine: TrainEngine, chosen: StepSamples, timer: PhaseTimer
) -> dict[str, float]:
    """Run an optimizer step on ``chosen``; return its metrics. Collective: the training grid."""
    from functools import partial

    from mindspeed_rl.algorithms.losses import supervised_loss
    from mindspeed_rl.building.models import batch_rules
    from mindspeed_rl.launch.attempt import restart_metrics
    from mindspeed_rl.metrics.metric_set import Mean, MetricSet, reduce_metrics
    from mindspeed_rl.metrics.names import REAL_SHARE, STEP_TIME, TOKENS_PER_S
    from mindspeed_rl.metrics.telemetry import named_phase
    from mindspeed_rl.metrics.throughput import devices_of, utilisation
    from mindspeed_rl.models.flops import training_flops
    from mindspeed_rl.packing.micro_batches import real_share
    from mindspeed_rl.trainer.nonfinite import require_finite

    with named_phase(timer, job.watchdog, "train"):
        rules = batch_rules(job)
        plan = rules.plan(chosen.lengths)
        mine = {i: chosen.samples[i] for i in rules.mine(plan)}
        batches = engine.prepare(rules.pack(plan, mine))
        loss = partial(supervised_loss, num_tokens=chosen.num_trained)
        found = engine.forward_backward(batches, loss)
        require_finite(engine, batches, loss)
        stats = engine.step()
    metrics = MetricSet({"loss": Mean(0.0, 0.0)}).merge(found)
    values = reduce_metrics(metrics.merge(timer.finish_step().metrics()))
    if not math.isfinite(values["loss"]):
        raise FloatingPointError(f"supervised loss is {values['loss']}; lower --lr")
    values |= {"optimizer/grad_norm": stats.grad_norm, "optimizer/lr": stats.learning_rate}
    values[REAL_SHARE] = real_share([plan], chosen.lengths)
    seconds, world = values[STEP_TIME], job.plan.parallel.world
    devices = devices_of(job.config, world, job.platform.device_name)
    flops = training_flops(job.plan.spec, chosen.lengths)
    values |= utilisation("", flops, seconds, devices) | restart_metrics()
    return values | {TOKENS_PER_S: sum(chosen.lengths) / seconds}


def refuse_other_data(ignored: Sequence[str]) -> None:
    """Refuse flags that RL ignores but that would change this training.

    Raises:
        UsageError: the message names the flags.
    """
    harmless = "--dataloader-type single"
    given = [flag for flag in ignored if flag.split()[0] in OTHER_DATA and flag != harmless]
    if given:
        raise UsageError(
            f"{', '.join(given)}: not available with --stage pretrain, which reads --data-path in "
            "Megatron's default order and trains on every token; remove them"
        )


@start_stage("training data")
def load_source(job: SftJob) -> SampleSource:
    """Open the source of training samples. Collective: the world."""
    from mindspeed_rl.data.batches import SupervisedSamples

    config = job.config
    if config.sft.stage == "sft":
        return SupervisedSamples(load_examples(job), config.train.seed, config.sft.shuffle)
    from mindspeed_rl.trainer.indexed_data import IndexedSamples

    return IndexedSamples(
        config.indexed,
        seed=config.train.seed,
        seq_length=config.train.seq_length,
        num_samples=config.train.train_iters * config.train.global_batch_size,
        vocab_size=job.plan.spec.vocab_size,
    )


def load_examples(job: SftJob) -> SupervisedDataset:
    """Load the supervised data set, tokenised. Local."""
    from mindspeed_rl.building.models import load_tokenizer
    from mindspeed_rl.data.supervised import load_supervised

    sft = job.config.sft
    return load_supervised(
        sft.sft_data,
        load_tokenizer(job.config),
        job.config.train.seq_length or job.plan.spec.max_position_embeddings,
        vocab_size=job.plan.spec.vocab_size,
        prompt_key=sft.prompt_key,
        solution_key=sft.solution_key,
        answer_key=sft.answer_key,
        apply_chat_template=sft.apply_chat_template,
        system_message=job.config.chat.system_message,
    )


if __name__ == "__main__":
    run_entry("mindspeed_rl.pretrain", PretrainRunConfig, plan_pretrain, main)
    end_process()
