"""A reward model's part of an RL step: the score of the last token of every sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from mindspeed_rl.memory.owners import Owner
from mindspeed_rl.rl.advantages import StepBatches
from mindspeed_rl.rl.batches import pack_placed
from mindspeed_rl.rl.build import RLJob
from mindspeed_rl.rl.update import Collected
from mindspeed_rl.samples.rollout_info import Sample
from mindspeed_rl.trainer.prepared import PreparedBatch
from mindspeed_rl.trainer.train_engine import TrainEngine


def add_scores(run: RLJob, collected: Collected, batches: StepBatches) -> Collected:
    """The same rollouts with the model's score as a part of their rewards, weighted.

    A sample whose rewards abstained still has none. Collective: the world; within TRAIN.

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
        # where the policy trains on them
        packed = pack_placed(run, batches.placed, run.reward_model, at_the_end=True)
        ids = [s.sample_id for s in collected.samples]
        scores = last_token_values(run, run.reward_model, ids, packed)
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


def last_token_values(
    run: RLJob,
    engine: TrainEngine,
    sample_ids: Sequence[int],
    updates: Sequence[Sequence[PreparedBatch]],
) -> list[float]:
    """The value at the last token of each whole sequence, on all ranks. Collective: the world.

    Args:
        run: the run.
        engine: that gives values.
        sample_ids: of all samples, in the order of the result.
        updates: the micro-batches of this rank, one pass for each list, with the one place of
            interest behind the last token of each sequence.
    """
    index = {sample_id: i for i, sample_id in enumerate(sample_ids)}
    scores = torch.zeros(len(sample_ids), device=run.job.platform.device)
    for batches in updates:
        for prepared, values in zip(batches, engine.values(batches), strict=True):
            if values is not None and engine.reports:
                batch = prepared.batch
                order = torch.tensor([index[i] for i in batch.sample_ids], dtype=torch.int64)
                scores[order.to(scores.device)[batch.sequence_of]] = values
    dist.all_reduce(scores)
    return scores.tolist()
