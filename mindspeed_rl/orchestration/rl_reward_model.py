"""A reward model's part of an RL step: the score of the last token of every sample."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.distributed as dist

from mindspeed_rl.experience.samples import Sample
from mindspeed_rl.memory.owners import Owner
from mindspeed_rl.orchestration.rl_batch import StepBatches
from mindspeed_rl.orchestration.rl_job import RLJob
from mindspeed_rl.orchestration.rl_samples import Placed, pack_placed
from mindspeed_rl.orchestration.rl_step import Collected
from mindspeed_rl.trainer.train_engine import TrainEngine


def add_scores(run: RLJob, collected: Collected, batches: StepBatches) -> Collected:
    """The same rollouts with the model's score as a part of their rewards, weighted.

    A sample whose rewards abstained still has none (R43). Collective: the world; within TRAIN.

    Args:
        run: the run.
        collected: its rollouts.
        batches: made of them.

    Raises:
        FloatingPointError: a score is not finite, on all ranks.
    """
    if run.reward_model is None or not collected.samples:
        return collected
    assert batches.placed is not None, "batches that were not made of samples"
    with run.phases.resident(Owner.REWARD_MODEL):
        scores = last_token_values(run, run.reward_model, batches.placed)
    pairs = list(zip(collected.samples, scores, strict=True))
    if bad := [s.sample_id for s, v in pairs if not math.isfinite(v)]:
        raise FloatingPointError(
            f"--reward-model-hf-checkpoint: the scores of samples {bad[:8]} are not finite"
        )
    by_id = {s.sample_id: v for s, v in pairs}
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


def last_token_values(run: RLJob, engine: TrainEngine, placed: Placed) -> list[float]:
    """The value at the last token of each whole sequence, on all ranks. Collective: the world.

    The samples are where the policy trains on them (R11): one pass for each optimizer step.
    """
    index = {s.sample_id: i for i, s in enumerate(placed.samples)}
    scores = torch.zeros(len(placed.samples), device=run.job.platform.device)
    for batches in pack_placed(run, placed, engine, at_the_end=True):
        for prepared, values in zip(batches, engine.values(batches), strict=True):
            if values is not None and engine.reports:
                batch = prepared.batch
                order = torch.tensor([index[i] for i in batch.sample_ids], dtype=torch.int64)
                scores[order.to(scores.device)[batch.sequence_of]] = values
    dist.all_reduce(scores)
    return scores.tolist()
