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
        loss_mask: [n] bool, the tokens that the model sampled; ``None``: all.
    """

    sample_id: int
    prompt_index: int
    response: torch.Tensor
    logprobs: torch.Tensor
    stopped: bool
    weights_version: int
    reward: float
    parts: tuple[float, ...]
    loss_mask: torch.Tensor | None = None

    @property
    def sampled(self) -> torch.Tensor:
        """The tokens of the response that the model sampled."""
        return self.response if self.loss_mask is None else self.response[self.loss_mask]


def pack_rollouts(
    rollouts: Sequence[Rollout], part_names: Sequence[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flatten rollouts to one int64 and one fp32 tensor: rows of all, then tokens of all. Local.

    A token ``t`` that the model did not sample travels as ``~t``, which is negative.
    """
    rows: list[int] = [len(rollouts)]
    scores: list[float] = []
    tokens: list[int] = []
    logprobs: list[float] = []
    nan = float("nan")
    for r in rollouts:
        done = r.completion
        rows += (r.sample_id, r.prompt.index, len(done.token_ids))
        rows += (int(not done.truncated), done.weights_version)
        scores.append(nan if r.reward is None else r.reward)
        scores += [r.reward_parts.get(name, nan) for name in part_names]
        mask = done.loss_mask or (True,) * len(done.token_ids)
        tokens += [t if mine else ~t for t, mine in zip(done.token_ids, mask, strict=True)]
        logprobs += done.logprobs
    return (
        torch.tensor(rows + tokens, dtype=torch.int64),
        torch.tensor(scores + logprobs, dtype=torch.float32),
    )


def unpack_rollouts(integers: torch.Tensor, floats: torch.Tensor, num_parts: int) -> list[Sample]:
    """The inverse of :func:`pack_rollouts`. Local."""
    count = int(integers[0])
    rows, tokens = integers[1 : 1 + count * _HEADER], integers[1 + count * _HEADER :]
    scores, logprobs = floats[: count * (1 + num_parts)], floats[count * (1 + num_parts) :]
    table = rows.view(count, _HEADER).tolist()
    lengths = [row[2] for row in table]
    return [
        Sample(
            sample_id,
            prompt,
            torch.where(response < 0, ~response, response),
            logp,
            bool(stopped),
            version,
            reward,
            tuple(parts),
            None if bool((response >= 0).all()) else response >= 0,
        )
        for (sample_id, prompt, _, stopped, version), (reward, *parts), response, logp in zip(
            table,
            scores.view(count, 1 + num_parts).tolist(),
            torch.split(tokens, lengths),
            torch.split(logprobs, lengths),
            strict=True,
        )
    ]


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
    messages = all_gather_pairs(*pack_rollouts(rollouts, part_names))
    samples = [s for pair in messages for s in unpack_rollouts(*pair, len(part_names))]
    samples.sort(key=lambda s: s.sample_id)
    ids = [s.sample_id for s in samples]
    if ids != list(range(num_samples)):
        missing = sorted(set(range(num_samples)) - set(ids))
        raise RuntimeError(
            f"rollouts of this step: {len(ids)} arrived, {num_samples} expected; missing {missing}"
        )
    return samples


@dataclass(frozen=True, slots=True)
class Continuation:
    """A sample whose next turn is to be generated.

    Attributes:
        sample_id: position in the step.
        max_tokens: limit of the turn.
        token_ids: all that the model reads.
    """

    sample_id: int
    max_tokens: int
    token_ids: tuple[int, ...]


def exchange_continuations(mine: Sequence[Continuation]) -> list[Continuation]:
    """Those of all ranks on every rank, by sample id. Collective: the world."""
    packed: list[int] = []
    for c in mine:
        packed += (c.sample_id, c.max_tokens, len(c.token_ids), *c.token_ids)
    found = []
    for integers, _ in all_gather_pairs(torch.tensor(packed, dtype=torch.int64), torch.zeros(0)):
        values, at = integers.tolist(), 0
        while at < len(values):
            sample_id, max_tokens, length = values[at : at + 3]
            end = at + 3 + length
            found.append(Continuation(sample_id, max_tokens, tuple(values[at + 3 : end])))
            at = end
    return sorted(found, key=lambda c: c.sample_id)


def all_gather_pairs(
    integers: torch.Tensor, floats: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The int64 and the fp32 tensor of every rank, in rank order. Collective: the world.

    Two collectives in all.
    """
    world = dist.get_world_size()
    size = torch.tensor([integers.numel(), floats.numel()])
    sizes = [torch.empty_like(size) for _ in range(world)]
    dist.all_gather(sizes, size)
    borders = [(8 * n, 8 * n + 4 * m) for n, m in torch.stack(sizes).tolist()]
    mine = torch.zeros(max(end for _, end in borders), dtype=torch.uint8)
    message = torch.cat([integers.view(torch.uint8), floats.view(torch.uint8)])
    mine[: message.numel()] = message
    parts = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(parts, mine)
    return [
        (part[:middle].view(torch.int64), part[middle:end].view(torch.float32))
        for part, (middle, end) in zip(parts, borders, strict=True)
    ]
