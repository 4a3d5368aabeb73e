"""A reward model's part of an RL step: the score of the last token of every sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from mindspeed_rl.data.packing import TrainSample
from mindspeed_rl.experience.exchange import Sample
from mindspeed_rl.memory.owners import Owner
from mindspeed_rl.orchestration import training
from mindspeed_rl.orchestration.rl_batch import as_train_samples
from mindspeed_rl.orchestration.rl_job import RLJob
from mindspeed_rl.orchestration.rl_step import Collected
from mindspeed_rl.trainer.train_engine import TrainEngine


def add_scores(run: RLJob, collected: Collected) -> Collected:
    """The same rollouts with the model's score as a part of their rewards, weighted.

    A sample whose rewards abstained still has none (R43). Collective: the world; within TRAIN.

    Raises:
        FloatingPointError: a score is not finite, on all ranks.
    """
    if run.reward_model is None or not collected.samples:
        return collected
    with run.phases.resident(Owner.REWARD_MODEL):
        samples = as_train_samples(run, collected.samples)
        scores = last_token_values(run, run.reward_model, samples)
    if bad := [s.sample_id for s, v in zip(samples, scores, strict=True) if not math.isfinite(v)]:
        raise FloatingPointError(
            f"--reward-model-hf-checkpoint: the scores of samples {bad[:8]} are not finite"
        )
    by_id = {s.sample_id: v for s, v in zip(collected.samples, scores, strict=True)}
    weight = run.config.rewards.reward_model_weight

    def scored(sample: Sample) -> Sample:
        score = by_id[sample.sample_id]
        parts = (*sample.parts, score)
        return replace(sample, reward=sample.reward + weight * score, parts=parts)

    return replace(
        collected,
        samples=[scored(s) for s in collected.samples],
        drawn=[scored(s) for s in collected.drawn],
    )


def last_token_values(
    run: RLJob, engine: TrainEngine, samples: Sequence[TrainSample]
) -> list[float]:
    """The value at the last token of each whole sequence, on all ranks. Collective: the world."""
    batches = training.local_batches(run.job, engine, [_at_the_end(s) for s in samples])
    index = {s.sample_id: i for i, s in enumerate(samples)}
    scores = torch.zeros(len(samples), device=run.job.platform.device)
    for prepared, values in zip(batches, engine.values(batches), strict=True):
        if values is not None and engine.reports:
            order = torch.tensor([index[i] for i in prepared.batch.sample_ids], dtype=torch.int64)
            scores[order.to(scores.device)[prepared.batch.sequence_of]] = values
    dist.all_reduce(scores)
    return scores.tolist()


def _at_the_end(sample: TrainSample) -> TrainSample:
    """The sequence with one place of interest: behind its last token."""
    return TrainSample(sample.sample_id, sample.token_ids, sample.length, token_after=0)
