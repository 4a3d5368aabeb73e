"""Supervised entry: ``torchrun ... -m mindspeed_rl.pretrain``: fine-tuning and pretraining."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from mindspeed_rl.config import PretrainRunConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.launch.entry import run_entry
from mindspeed_rl.launch.job import Job
from mindspeed_rl.planning.run_plan import RunPlan, plan_pretrain

if TYPE_CHECKING:
    from mindspeed_rl.data.batches import StepSamples, SupervisedSamples
    from mindspeed_rl.data.supervised import SupervisedDataset
    from mindspeed_rl.metrics.timers import PhaseTimer
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
    from mindspeed_rl.metrics.output_dir import take_output_dir
    from mindspeed_rl.metrics.telemetry import (
        log_description,
        named_phase,
        open_logger,
        open_progress,
        open_timer,
    )
    from mindspeed_rl.rl.build_models import build_engine, initialize_parallel
    from mindspeed_rl.trainer import run_checkpoint
    from mindspeed_rl.trainer.export import export_policy

    train = job.config.train
    if job.config.sft.stage == "pretrain":
        refuse_other_data(job.ignored)
    logger = open_logger(job.config, job.world.rank)
    initialize_parallel(job)
    source = load_source(job)
    engine = build_engine(job, "policy", train.train_iters)
    batches = f"{job.config.sft.stage}: {train.train_iters} steps of {train.global_batch_size}"
    log_description(job, source.report(), batches)
    loaded = run_checkpoint.load(job, engine)
    if loaded.extra:
        source.load_state_dict(
            loaded.extra["sampler"], allow_changed_data=job.config.checkpoint.allow_changed_data
        )
    take_output_dir(
        job.config.logging, job.config.checkpoint.load, job.world.local_rank, loaded.step
    )
    timer, profiler = open_timer(job)
    with closing(logger):
        logger.truncate_after(loaded.step)
        progress = open_progress(job.config, loaded.step, job.config.sft.stage, job.world.rank)
        timer.finish_step()  # the start-up belongs to no step
        for step in range(loaded.step + 1, train.train_iters + 1):
            profiler.begin_step(step)
            values = train_step(job, engine, source.next(train.global_batch_size), timer)
            with named_phase(timer, job.watchdog, "log"):
                logger.log(step, values)
                progress.update(step, {"loss": values["loss"], "lr": values["optimizer/lr"]})
            if run_checkpoint.save_is_due(job.config.checkpoint, train.train_iters, step):
                with named_phase(timer, job.watchdog, "save"):
                    run_checkpoint.save(job, engine, step, {"sampler": source.state_dict()})
        profiler.close()
        progress.close()
    if target := job.config.checkpoint.export_hf:
        with job.watchdog.phase("export"):
            export_policy(job, engine, target, train.train_iters)
        job.log_rank0(f"HF checkpoint: {target}")


def train_step(
    job: SftJob, engine: TrainEngine, chosen: StepSamples, timer: PhaseTimer
) -> dict[str, float]:
    """Run an optimizer step on ``chosen``; return its metrics. Collective: the training grid."""
    from functools import partial

    from mindspeed_rl.algorithms.losses import supervised_loss
    from mindspeed_rl.metrics.metric_set import Mean, MetricSet, reduce_metrics
    from mindspeed_rl.metrics.names import REAL_SHARE, STEP_TIME, TOKENS_PER_S
    from mindspeed_rl.metrics.telemetry import named_phase
    from mindspeed_rl.metrics.throughput import devices_of, utilisation
    from mindspeed_rl.models.flops import training_flops
    from mindspeed_rl.planning.micro_batches import real_share
    from mindspeed_rl.rl.build_models import batch_rules

    with named_phase(timer, job.watchdog, "train"):
        rules = batch_rules(job)
        plan = rules.plan(chosen.lengths)
        mine = {i: chosen.samples[i] for i in rules.mine(plan)}
        batches = engine.prepare(rules.pack(plan, mine))
        loss = partial(supervised_loss, num_tokens=chosen.num_trained)
        found = engine.forward_backward(batches, loss)
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
    values |= utilisation("", flops, seconds, devices)
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
    from mindspeed_rl.data.supervised import load_supervised
    from mindspeed_rl.rl.build_models import load_tokenizer

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
    )


if __name__ == "__main__":
    run_entry("mindspeed_rl.pretrain", PretrainRunConfig, plan_pretrain, main)
