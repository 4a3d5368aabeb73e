"""Supervised entry: ``torchrun ... -m mindspeed_rl.pretrain``, used for warm starts before RL."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mindspeed_rl.config import PretrainRunConfig
from mindspeed_rl.config.validate import RunPlan, check_pretrain
from mindspeed_rl.orchestration.torchrun import Job, run_entry

if TYPE_CHECKING:
    from mindspeed_rl.data.supervised import SupervisedDataset, SupervisedExample
    from mindspeed_rl.observability.timers import PhaseTimer
    from mindspeed_rl.trainer.train_engine import TrainEngine

SftJob = Job[PretrainRunConfig, RunPlan]


def main(job: SftJob) -> None:
    """Train on prompt and solution pairs; the loss is on the solution."""
    from mindspeed_rl.data.sampler import PromptSampler
    from mindspeed_rl.observability.loggers import RunLogger
    from mindspeed_rl.observability.progress import RunProgress
    from mindspeed_rl.observability.timers import PhaseTimer
    from mindspeed_rl.orchestration import checkpoints, results, training

    train, logs = job.config.train, job.config.logging
    training.initialize_parallel(job)
    examples = load_examples(job)
    engine = training.build_engine(job, "policy", train.train_iters)
    sampler = PromptSampler(
        len(examples), train.seed, job.config.sft.shuffle, fingerprint=examples.fingerprint
    )
    describe(job, examples)
    loaded = checkpoints.load(job, engine)
    if loaded.extra:
        sampler.load_state_dict(
            loaded.extra["sampler"], allow_changed_data=job.config.checkpoint.allow_changed_data
        )
    results.claim(job, loaded.step)
    writer = job.world.rank == 0
    timer = PhaseTimer(job.platform.synchronize)
    backends = ("jsonl", "tensorboard")
    with RunLogger(logs.output_dir, writer, backends, logs.tensorboard_dir) as logger:
        logger.truncate_after(loaded.step)
        progress = RunProgress(
            train.train_iters, loaded.step, "sft", writer, log_interval=logs.log_interval
        )
        timer.restart()
        for step in range(loaded.step + 1, train.train_iters + 1):
            chosen = [examples[i] for i in sampler.next(train.global_batch_size)]
            values = train_step(job, engine, chosen, timer)
            with timer("log"):
                logger.log(step, values)
                progress.update(step, {"loss": values["loss"], "lr": values["optimizer/lr"]})
            if checkpoints.save_is_due(job, step):
                with timer("save"), job.watchdog.phase("save"):
                    checkpoints.save(job, engine, step, {"sampler": sampler.state_dict()})
        progress.close()
    if target := job.config.checkpoint.export_hf:
        with job.watchdog.phase("export"):
            training.export_hf(job, engine, target, train.train_iters)
        job.say(f"HF checkpoint: {target}")


def train_step(
    job: SftJob, engine: TrainEngine, chosen: Sequence[SupervisedExample], timer: PhaseTimer
) -> dict[str, float]:
    """One optimizer step on ``chosen``; its metrics. Collective: the training grid."""
    from functools import partial

    import torch

    from mindspeed_rl.algorithms.losses import supervised_loss
    from mindspeed_rl.algorithms.types import Denominators
    from mindspeed_rl.data.packing import TrainSample
    from mindspeed_rl.observability.metrics import Mean, MetricSet, reduce_metrics
    from mindspeed_rl.orchestration import training

    trained = Denominators(sum(e.num_response_tokens for e in chosen))
    samples = [
        TrainSample(i, torch.tensor(e.token_ids), e.num_prompt_tokens) for i, e in enumerate(chosen)
    ]
    with timer("train"), job.watchdog.phase("train"):
        batches = training.local_batches(job, engine, samples)
        loss = partial(supervised_loss, denominators=trained)
        found = engine.forward_backward(batches, loss)
        stats = engine.step()
    metrics = MetricSet({"loss": Mean(0.0, 0.0)}).merge(found)
    values = reduce_metrics(metrics.merge(timer.finish_step().metrics()))
    if not math.isfinite(values["loss"]):
        raise FloatingPointError(f"supervised loss is {values['loss']}; lower --lr")
    values |= {"optimizer/grad_norm": stats.grad_norm, "optimizer/lr": stats.learning_rate}
    num_tokens = sum(len(e.token_ids) for e in chosen)
    return values | {"throughput/tokens_per_s": num_tokens / values["time/step_s"]}


def load_examples(job: SftJob) -> SupervisedDataset:
    """The data set, tokenised. Local."""
    from mindspeed_rl.data.supervised import load_supervised
    from mindspeed_rl.orchestration import training

    sft = job.config.sft
    return load_supervised(
        sft.sft_data,
        training.load_tokenizer(job.config),
        job.config.train.seq_length or job.plan.spec.max_position_embeddings,
        prompt_key=sft.prompt_key,
        solution_key=sft.solution_key,
        answer_key=sft.answer_key,
        apply_chat_template=sft.apply_chat_template,
    )


def describe(job: SftJob, examples: SupervisedDataset) -> None:
    """Say at start what will run."""
    parallel, train = job.plan.parallel, job.config.train
    job.say(
        f"layout: tp {parallel.tp} x pp {parallel.pp} x dp {parallel.dp} on {job.platform.name}",
        examples.report(),
        f"sft: {train.train_iters} steps of {train.global_batch_size}",
        *([f"flags without meaning here: {', '.join(job.ignored)}"] if job.ignored else []),
    )


if __name__ == "__main__":
    run_entry("mindspeed_rl.pretrain", PretrainRunConfig, check_pretrain, main)
