"""Supervised entry: ``torchrun ... -m mindspeed_rl.pretrain``, used for warm starts before RL."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_rl.config import PretrainRunConfig
from mindspeed_rl.config.validate import RunPlan, check_pretrain
from mindspeed_rl.orchestration.torchrun import Job, run_entry

if TYPE_CHECKING:
    from mindspeed_rl.data.packing import TrainSample
    from mindspeed_rl.data.supervised import SupervisedExample


def main(job: Job[PretrainRunConfig, RunPlan]) -> None:
    """Train on prompt and solution pairs; the loss is on the solution."""
    from functools import partial

    from mindspeed_rl.algorithms.losses import supervised_loss
    from mindspeed_rl.algorithms.types import Denominators
    from mindspeed_rl.data.sampler import PromptSampler
    from mindspeed_rl.data.supervised import fingerprint_of, load_supervised
    from mindspeed_rl.observability.loggers import RunLogger
    from mindspeed_rl.observability.metrics import Mean, MetricSet, reduce_metrics
    from mindspeed_rl.observability.progress import RunProgress
    from mindspeed_rl.observability.timers import PhaseTimer
    from mindspeed_rl.orchestration import checkpoints, training

    config, train = job.config, job.config.train
    training.initialize_parallel(job)
    tokenizer = training.load_tokenizer(config)
    examples = load_supervised(
        config.sft.sft_data,
        tokenizer,
        train.seq_length or job.plan.spec.max_position_embeddings,
        prompt_key=config.sft.prompt_key,
        solution_key=config.sft.solution_key,
        answer_key=config.sft.answer_key,
    )
    engine = training.build_engine(job, "policy", train.train_iters)
    sampler = PromptSampler(
        len(examples), train.seed, config.sft.shuffle, fingerprint=fingerprint_of(examples)
    )
    describe(job, len(examples))
    loaded = checkpoints.load(job, engine)
    if loaded.extra:
        sampler.load_state_dict(loaded.extra["sampler"])
    writer = job.world.rank == 0
    timer = PhaseTimer(job.platform.synchronize)
    logs = config.logging
    with RunLogger(
        logs.output_dir, writer, ("jsonl", "tensorboard"), logs.tensorboard_dir
    ) as logger:
        logger.truncate_after(loaded.step)
        progress = RunProgress(
            train.train_iters, loaded.step, "sft", writer, log_interval=config.logging.log_interval
        )
        for step in range(loaded.step + 1, train.train_iters + 1):
            with timer("train"), job.watchdog.phase("train"):
                chosen = [examples[i] for i in sampler.next(train.global_batch_size)]
                samples = [as_sample(i, example) for i, example in enumerate(chosen)]
                trained = Denominators(
                    tokens=sum(e.num_response_tokens for e in chosen), sequences=len(chosen)
                )
                metrics = engine.forward_backward(
                    training.local_batches(job, engine, samples),
                    partial(supervised_loss, denominators=trained),
                )
                stats = engine.step()
            metrics = metrics.merge({} if metrics else {"loss": Mean(0.0, 0.0)})
            values = reduce_metrics(MetricSet(metrics).merge(timer.finish_step().metrics()))
            values |= {"optimizer/grad_norm": stats.grad_norm, "optimizer/lr": stats.learning_rate}
            values["throughput/tokens_per_s"] = (
                sum(len(e.token_ids) for e in chosen) / values["time/step_s"]
            )
            if not math.isfinite(values["loss"]):
                raise FloatingPointError(f"loss {values['loss']} at step {step}")
            logger.log(step, values)
            progress.update(step, {"loss": values["loss"], "lr": values["optimizer/lr"]})
            if checkpoints.save_is_due(job, step):
                with timer("save"), job.watchdog.phase("save"):
                    checkpoints.save(job, engine, step, {"sampler": sampler.state_dict()})
        progress.close()
    if config.checkpoint.export_hf:
        with job.watchdog.phase("export"):
            training.export_hf(job, engine, config.checkpoint.export_hf)
        job.say(f"HF checkpoint: {Path(config.checkpoint.export_hf)}")


def as_sample(sample_id: int, example: SupervisedExample) -> TrainSample:
    """One supervised example as a training sample."""
    import torch

    from mindspeed_rl.data.packing import TrainSample

    return TrainSample(sample_id, torch.tensor(example.token_ids), example.num_prompt_tokens)


def describe(job: Job[PretrainRunConfig, RunPlan], num_examples: int) -> None:
    """Say at start what will run."""
    parallel, train = job.plan.parallel, job.config.train
    job.say(
        f"layout: tp {parallel.tp} x pp {parallel.pp} x dp {parallel.dp} on {job.platform.name}",
        f"sft: {num_examples} examples, {train.train_iters} steps of {train.global_batch_size}",
        *([f"flags without meaning here: {', '.join(job.ignored)}"] if job.ignored else []),
    )


if __name__ == "__main__":
    run_entry("mindspeed_rl.pretrain", PretrainRunConfig, check_pretrain, main)
