"""Packing of ragged samples into micro-batches: which samples, and the packed tensors.

Shapes: T packed tokens of a micro-batch, S sequences in it, N trained tokens in it.

A micro-batch is one row of T tokens. Position t carries the token t and everything about the token
t + 1 of the same sequence: ``targets[t]`` is that token and ``loss_mask[t]`` says whether it is
trained on. Shifting happens here, before any split of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One sequence to train on: local, on the host or a device.

    Attributes:
        sample_id: equal on all ranks.
        token_ids: [length] int64, prompt and response.
        num_prompt_tokens: tokens that are read but not trained on; at least 1.
        rollout_logprobs: [length - num_prompt_tokens] fp32, the engine's; ``None`` in SFT.
        advantage: of the whole response; 0 in SFT.
    """

    sample_id: int
    token_ids: torch.Tensor
    num_prompt_tokens: int
    rollout_logprobs: torch.Tensor | None = None
    advantage: float = 0.0

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return int(self.token_ids.numel())


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A packed micro-batch.

    Attributes:
        token_ids: [T] int64; padding at the end is token 0.
        positions: [T] int64, position within the own sequence.
        targets: [T] int64, the next token of the same sequence, 0 where there is none.
        loss_mask: [T] bool, true where the target is a trained token.
        lengths: tokens of each of the S sequences, in order; the rest of T is padding.
        sample_ids: S ids.
        rollout_logprobs: [N] fp32, at the masked positions in order.
        advantages: [N] fp32.
        sequence_of: [N] int64, which of the S sequences a trained token belongs to.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    loss_mask: torch.Tensor
    lengths: tuple[int, ...]
    sample_ids: tuple[int, ...]
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    sequence_of: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return int(self.token_ids.numel())


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """Which samples form which micro-batch on each data-parallel rank.

    The same plan serves the reference, old-policy and update passes (R11). Every rank has the same
    number of micro-batches, of the same padded length (R31).

    Attributes:
        assignment: [dp][micro-batch] -> positions in the list of samples.
        padded_length: T of every micro-batch, in tokens.
    """

    assignment: tuple[tuple[tuple[int, ...], ...], ...]
    padded_length: int

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of each data-parallel rank."""
        return len(self.assignment[0])


def plan_micro_batches(
    lengths: Sequence[int], *, dp: int, micro_batch_size: int, max_tokens: int, multiple: int
) -> MicroBatchPlan:
    """Split samples over data-parallel ranks and pack them in order. Pure: equal on all ranks.

    Args:
        lengths: tokens of each sample.
        dp: data-parallel size; sample ``i`` goes to rank ``i % dp``.
        micro_batch_size: sequences per micro-batch, used when ``max_tokens`` is 0.
        max_tokens: tokens per micro-batch.
        multiple: T is rounded up to a multiple of this.

    Raises:
        ValueError: a sample is longer than ``max_tokens``.
    """
    if max_tokens and max(lengths, default=0) > max_tokens:
        raise ValueError(
            f"--max-tokens-per-micro-batch {max_tokens} is smaller than a sample of "
            f"{max(lengths)} tokens; raise it to at least the longest sequence"
        )
    per_rank = []
    for rank in range(dp):
        mine = range(rank, len(lengths), dp)
        if max_tokens:
            per_rank.append(_by_tokens(mine, lengths, max_tokens))
        else:
            bounds = range(0, len(mine), micro_batch_size)
            per_rank.append([tuple(mine[i : i + micro_batch_size]) for i in bounds])
    count = max(1, *(len(batches) for batches in per_rank))
    longest = max((sum(lengths[i] for i in b) for batches in per_rank for b in batches), default=1)
    padded = -(-max(1, longest) // multiple) * multiple
    return MicroBatchPlan(
        tuple(tuple(batches) + ((),) * (count - len(batches)) for batches in per_rank), padded
    )


def _by_tokens(
    mine: Sequence[int], lengths: Sequence[int], max_tokens: int
) -> list[tuple[int, ...]]:
    batches: list[tuple[int, ...]] = []
    current: list[int] = []
    used = 0
    for i in mine:
        if current and used + lengths[i] > max_tokens:
            batches.append(tuple(current))
            current, used = [], 0
        current.append(i)
        used += lengths[i]
    if current:
        batches.append(tuple(current))
    return batches


def pack(samples: Sequence[TrainSample], padded_length: int) -> MicroBatch:
    """Pack samples into one row of ``padded_length`` tokens. Local.

    An empty list gives a well-formed micro-batch that trains on nothing.
    """
    lengths = tuple(s.length for s in samples)
    total = sum(lengths)
    if total > padded_length:
        raise RuntimeError(f"{total} tokens do not fit into a micro-batch of {padded_length}")
    length = torch.tensor(lengths, dtype=torch.int64)
    num_prompt = torch.tensor([s.num_prompt_tokens for s in samples], dtype=torch.int64)
    owner = torch.repeat_interleave(length)  # [total] sequence of each token
    position = torch.arange(total) - (length.cumsum(0) - length)[owner]
    has_target = position < (length - 1)[owner]
    token_ids = torch.zeros(padded_length, dtype=torch.int64)
    token_ids[:total] = _cat([s.token_ids for s in samples], torch.int64)
    positions = torch.zeros_like(token_ids)
    positions[:total] = position
    targets = torch.zeros_like(token_ids)
    targets[:total] = token_ids.roll(-1)[:total] * has_target
    mask = torch.zeros(padded_length, dtype=torch.bool)
    mask[:total] = has_target & (position >= (num_prompt - 1)[owner])
    sequence_of = owner[mask[:total]]
    num_trained = (length - num_prompt).tolist()
    logprobs = [
        torch.zeros(n) if s.rollout_logprobs is None else s.rollout_logprobs
        for s, n in zip(samples, num_trained, strict=True)
    ]
    return MicroBatch(
        token_ids=token_ids,
        positions=positions,
        targets=targets,
        loss_mask=mask,
        lengths=lengths,
        sample_ids=tuple(s.sample_id for s in samples),
        rollout_logprobs=_cat(logprobs, torch.float32),
        advantages=torch.tensor([s.advantage for s in samples], dtype=torch.float32)[sequence_of],
        sequence_of=sequence_of,
    )


def _cat(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat(list(parts)).to(dtype) if parts else torch.zeros(0, dtype=dtype)
