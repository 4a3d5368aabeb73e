"""Adds the reward model's score of the last token of every sample to the rewards of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from mindspeed_rl.core.memory import MemoryOwner
from mindspeed_rl.rl.components import Components
from mindspeed_rl.rl.rollouts import RolloutBatch
from mindspeed_rl.samples.packing import MicroBatch
from mindspeed_rl.samples.rollout_info import RolloutInfo
from mindspeed_rl.samples.store import PlacedSamples
from mindspeed_rl.trainer.train_engine import TrainEngine


def add_model_scores(
    run: Components, rollouts: RolloutBatch, placed: PlacedSamples
) -> RolloutBatch:
    """Return the rollouts with the model's weighted score added to their rewards.

    A sample whose rewards abstained still has none. Collective: the world; within TRAIN.

    Args:
        run: Parts of the run.
        rollouts: Rollouts of the step.
        placed: Samples of the rollouts, on the ranks where the policy trains on them.

    Raises:
        FloatingPointError: a score is not finite, on all ranks.
    """
    model = run.models.reward_model
    if model is None or not rollouts.samples:
        return rollouts
    with run.scheduler.onloaded(MemoryOwner.REWARD_MODEL):
        packed = [model.prepare(p) for p in run.samples.pack(placed, at_the_end=True)]
        scores = last_token_values(
            model, [s.sample_id for s in rollouts.samples], packed, run.job.platform.device
        )
    pairs = list(zip(rollouts.samples, scores, strict=True))
    if bad := [s.sample_id for s, v in pairs if not math.isfinite(v)]:
        raise FloatingPointError(
            f"--reward-model-hf-checkpoint: the scores of samples {bad[:8]} are not finite"
        )
    by_id = {s.sample_id: v for s, v in pairs}
    weight = run.config.rewards.reward_model_weight

    def scored(sample: RolloutInfo) -> RolloutInfo:
        score = by_id[sample.sample_id]
        parts = (*sample.parts, score)
        return replace(sample, reward=sample.reward + weight * score, parts=parts)

    return replace(
        rollouts,
        samples=[scored(s) for s in rollouts.samples],
        generated=[scored(s) for s in rollouts.generated],
    )


def last_token_values(
    engine: TrainEngine,
    sample_ids: Sequence[int],
    updates: Sequence[Sequence[MicroBatch]],
    device: torch.device,
) -> list[float]:
    """Return the value at the last token of each sequence, on all ranks. Collective: the world.

    Args:
        engine: Engine with a value head.
        sample_ids: Ids of all samples, in the order of the result.
        updates: Micro-batches of this rank, one pass for each list, in which only the place
            behind the last token of each sequence is selected.
        device: Device of the engine.
    """
    index = {sample_id: i for i, sample_id in enumerate(sample_ids)}
    scores = torch.zeros(len(sample_ids), device=device)
    for batches in updates:
        for micro, values in zip(batches, engine.values(batches), strict=True):
            if values is not None and engine.is_metrics_rank:
                order = torch.tensor([index[i] for i in micro.sample_ids], dtype=torch.int64)
                scores[order.to(device)[micro.sequence_of]] = values
    dist.all_reduce(scores)
    return scores.tolist()
