"""Finished rollouts from the engines that made them to the ranks that train on them.

Every engine's first rank contributes its samples; all ranks receive all samples, ordered by sample
id, so that every later decision (advantages, placement, filtering) is the same everywhere without
more messages. Prompt tokens do not travel: every rank has the data set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mindspeed_rl.types import Rollout

_HEADER = 5  # sample id, prompt index, response length, stopped, weights version


@dataclass(frozen=True, slots=True)
class Sample:
    """A finished sample as every rank knows it.

    Attributes:
        sample_id: position in the step, equal everywhere.
        prompt_index: row of the data set.
        response: [n] int64.
        logprobs: [n] fp32, the engine's.
        stopped: ended by a stop token rather than by the limit.
        weights_version: of the weights that sampled it.
        reward: NaN when it abstained.
        parts: scores of the single reward functions, NaN where one abstained.
    """

    sample_id: int
    prompt_index: int
    response: torch.Tensor
    logprobs: torch.Tensor
    stopped: bool
    weights_version: int
    reward: float
    parts: tuple[float, ...]


def pack_rollouts(
    rollouts: Sequence[Rollout], part_names: Sequence[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flatten rollouts to one int64 and one fp32 tensor. Local."""
    integers: list[int] = []
    floats: list[float] = []
    nan = float("nan")
    for r in rollouts:
        done = r.completion
        integers += [r.sample_id, r.prompt.index, len(done.token_ids)]
        integers += [int(not done.truncated), done.weights_version, *done.token_ids]
        floats += [nan if r.reward is None else r.reward]
        floats += [r.reward_parts.get(name, nan) for name in part_names]
        floats += done.logprobs
    return (
        torch.tensor(integers, dtype=torch.int64),
        torch.tensor(floats, dtype=torch.float32),
    )


def unpack_rollouts(integers: torch.Tensor, floats: torch.Tensor, num_parts: int) -> list[Sample]:
    """The inverse of :func:`pack_rollouts`. Local."""
    samples = []
    i = f = 0
    numbers, scores = integers.tolist(), floats.tolist()
    while i < len(numbers):
        sample_id, prompt, length, stopped, version = numbers[i : i + _HEADER]
        i += _HEADER
        reward, *parts = scores[f : f + 1 + num_parts]
        f += 1 + num_parts
        samples.append(
            Sample(
                sample_id,
                prompt,
                integers[i : i + length],
                floats[f : f + length],
                bool(stopped),
                version,
                reward,
                tuple(parts),
            )
        )
        i, f = i + length, f + length
    return samples


def exchange_rollouts(
    rollouts: Sequence[Rollout], part_names: Sequence[str], num_samples: int
) -> list[Sample]:
    """All samples of the step on every rank, by sample id. Collective: the world.

    Args:
        rollouts: this rank's own; empty on ranks that only mirror another rank's engine.
        part_names: names of the reward functions, equal on all ranks.
        num_samples: how many there must be in all.

    Raises:
        RuntimeError: a sample is missing or there twice.
    """
    packed = pack_rollouts(rollouts, part_names)
    integers, floats = (_all_gather_ragged(tensor) for tensor in packed)
    samples = sorted(unpack_rollouts(integers, floats, len(part_names)), key=lambda s: s.sample_id)
    ids = [s.sample_id for s in samples]
    if ids != list(range(num_samples)):
        missing = sorted(set(range(num_samples)) - set(ids))
        raise RuntimeError(
            f"rollouts of this step: {len(ids)} arrived, {num_samples} expected; missing {missing}"
        )
    return samples


def _all_gather_ragged(mine: torch.Tensor) -> torch.Tensor:
    """Concatenate 1-d tensors of different lengths over all ranks, in rank order."""
    world = dist.get_world_size()
    size = torch.tensor([mine.numel()])
    sizes = [torch.empty_like(size) for _ in range(world)]
    dist.all_gather(sizes, size)
    lengths = [int(s) for s in sizes]
    padded = torch.zeros(max(1, *lengths), dtype=mine.dtype)
    padded[: mine.numel()] = mine
    parts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded)
    return torch.cat([part[:n] for part, n in zip(parts, lengths, strict=True)])
