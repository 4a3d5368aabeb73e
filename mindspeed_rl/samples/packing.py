"""Packing of the ragged samples of a micro-batch into one row.

Shapes: T packed tokens of a micro-batch, S sequences in it, N trained tokens in it.

A micro-batch is one row of T tokens. Position t holds token t and everything about token t + 1 of
the same sequence: ``targets[t]`` is that token and ``loss_mask[t]`` is true where it is trained on.
This shift is made here, before any split of the row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mindspeed_rl.core.layout import round_up
from mindspeed_rl.core.types import TrainSample
from mindspeed_rl.samples.columns import ROLLOUT_LOGPROBS, TRAINING_COLUMNS


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A packed micro-batch: one row of tokens, and columns of its trained tokens.

    Every pass uses the same object; a stage that computes more about its tokens adds a column.

    Attributes:
        token_ids: [T] int32; padding at the end is token 0.
        positions: [T] int32, position within the token's own sequence.
        targets: [T] int32, the next token of the same sequence, 0 where there is none.
        loss_mask: [T] bool, true where the target is a trained token.
        lengths: Tokens of each of the S sequences, in order, with the padding after each; the rest
            of T is padding as well.
        num_real: Tokens of each of the S whole sequences without padding.
        sample_ids: Ids of the S samples.
        trained: [N] int32, the positions in this row whose targets are trained tokens.
        sequence_of: [N] int32, which of the S sequences a trained token belongs to.
        num_trained: Number of trained tokens of each of the S whole sequences.
        trained_index: [N] int32, which of the trained tokens of the whole row each one is.
        shared_by: Number of context-parallel ranks that share the row; ``None``: all of them.
        columns: [N, ...] by name, at the masked positions in order: see ``samples/columns.py``.
        attention: Borders between sequences, in the form that the trainer's attention needs.
        routes: Experts of the first pass, where routing is replayed.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    loss_mask: torch.Tensor
    lengths: tuple[int, ...]
    num_real: tuple[int, ...]
    sample_ids: tuple[int, ...]
    trained: torch.Tensor
    sequence_of: torch.Tensor
    num_trained: tuple[int, ...]
    trained_index: torch.Tensor
    shared_by: int | None = None
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    attention: Any = None
    routes: Any = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens T, padding included."""
        return int(self.token_ids.numel())

    def column(self, name: str) -> torch.Tensor:
        """Return a column that must exist: [N, ...].

        Raises:
            RuntimeError: The column was not filled.
        """
        found = self.columns.get(name)
        if found is None:
            known = TRAINING_COLUMNS.get(name)
            raise RuntimeError(
                f"a micro-batch lacks the column {name!r}"
                + (f", which is filled by {known.filled_by}" if known else "")
            )
        return found

    def with_column(self, name: str, values: torch.Tensor | None) -> MicroBatch:
        """Return a copy with a column of :data:`TRAINING_COLUMNS`; unchanged for ``None``."""
        if values is None:
            return self
        dtype = TRAINING_COLUMNS[name].dtype
        assert values.dtype is dtype, f"{name} is {values.dtype}, declared as {dtype}"
        assert values.shape == self.sequence_of.shape, f"{name} has {tuple(values.shape)}"
        return replace(self, columns={**self.columns, name: values})

    def to(self, device: torch.device) -> MicroBatch:
        """Move the micro-batch to a device."""
        tensors = {name: getattr(self, name).to(device) for name in _ROW_TENSORS}
        columns = {name: values.to(device) for name, values in self.columns.items()}
        return replace(self, columns=columns, **tensors)


_ROW_TENSORS = (
    *("token_ids", "positions", "targets", "loss_mask"),
    *("trained", "sequence_of", "trained_index"),
)


def pack(
    samples: Sequence[TrainSample],
    padded_length: int,
    sequence_multiple: int = 1,
    shared_by: int | None = None,
) -> MicroBatch:
    """Pack samples into one row of ``padded_length`` tokens, on the device of the samples. Local.

    Each sample is padded to a multiple of ``sequence_multiple``. An empty list gives a well-formed
    micro-batch that trains on nothing. ``shared_by`` context-parallel ranks share the row;
    ``None``: all of them.
    """
    lengths = tuple(round_up(s.length, sequence_multiple) for s in samples)
    total = sum(lengths)
    if total > padded_length:
        raise RuntimeError(f"{total} tokens do not fit into a micro-batch of {padded_length}")
    device = samples[0].token_ids.device if samples else torch.device("cpu")

    def of_samples(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    length = of_samples(lengths)
    real = of_samples([s.length for s in samples])
    # For each token of the samples and their padding: its sample, its place, whether one follows.
    owner = torch.repeat_interleave(length, output_size=total)
    position = torch.arange(total, device=device) - (length.cumsum(0) - length)[owner]
    continues = of_samples([s.token_after is not None for s in samples])
    has_target = position < (real - 1 + continues)[owner]
    token_ids = torch.zeros(padded_length, dtype=torch.int64, device=device)
    token_ids[:total][position < real[owner]] = _cat([s.token_ids for s in samples], device).to(
        torch.int64
    )
    positions = torch.zeros_like(token_ids)
    positions[:total] = position
    targets = torch.zeros_like(token_ids)
    targets[:total] = token_ids.roll(-1)[:total] * has_target
    at_end = has_target & (position == (real - 1)[owner])
    targets[:total][at_end] = of_samples(
        [s.token_after for s in samples if s.token_after is not None]
    )
    num_prompt = of_samples([s.num_prompt_tokens for s in samples])
    loss_mask = torch.zeros(padded_length, dtype=torch.bool, device=device)
    loss_mask[:total] = has_target & (position >= (num_prompt - 1)[owner])
    for sample, start in zip(samples, accumulate(lengths, initial=0), strict=False):
        if sample.loss_mask is not None:  # The mask of token t + 1 belongs to position t.
            first = start + sample.num_prompt_tokens - 1
            loss_mask[first : first + sample.loss_mask.numel()] &= sample.loss_mask
    trained = loss_mask.nonzero()[:, 0]
    sequence_of = owner[trained]
    num_trained = tuple(s.num_trained for s in samples)
    return MicroBatch(
        token_ids=token_ids.int(),
        positions=positions.int(),
        targets=targets.int(),
        loss_mask=loss_mask,
        lengths=lengths,
        num_real=tuple(s.length for s in samples),
        sample_ids=tuple(s.sample_id for s in samples),
        trained=trained.int(),
        sequence_of=sequence_of.int(),
        num_trained=num_trained,
        trained_index=torch.arange(sequence_of.numel(), device=device, dtype=torch.int32),
        shared_by=shared_by,
        columns=_columns_of(samples, num_trained),
    )


def _columns_of(
    samples: Sequence[TrainSample], num_trained: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Concatenate the columns of all samples.

    Without samples there is still an empty column of the engine's log-probs: the passes over a step
    compare with it in every micro-batch, and only samples tell which columns there are.

    Raises:
        RuntimeError: A sample lacks a column that others have, or has another number of rows.
    """
    if not samples:
        return {ROLLOUT_LOGPROBS.name: ROLLOUT_LOGPROBS.empty()}
    names = {name: None for s in samples for name in s.columns}
    for name in names:
        rows = [s.columns[name].size(0) if name in s.columns else -1 for s in samples]
        if rows != list(num_trained):
            wrong = next(s for s, r, n in zip(samples, rows, num_trained, strict=True) if r != n)
            raise RuntimeError(
                f"sample {wrong.sample_id}: column {name!r} does not have a row for each of its "
                f"{wrong.num_trained} trained tokens"
            )
    return {name: torch.cat([s.columns[name] for s in samples]) for name in names}


def _cat(parts: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.cat(list(parts)) if parts else torch.zeros(0, dtype=torch.int64, device=device)


def context_index(lengths: Sequence[int], row_length: int, cp: int, rank: int) -> torch.Tensor:
    """Return the positions of a row that a context-parallel rank holds, in its own order.

    Every sequence, and the padding after the last one, is cut into ``2 cp`` chunks; rank ``r``
    takes chunks ``r`` and ``2 cp - 1 - r``, so that all ranks attend to equally many keys.

    Args:
        lengths: Tokens of each sequence, multiples of ``2 cp``.
        row_length: T, a multiple of ``2 cp``.
        cp: Context-parallel size.
        rank: Position in the group.

    Returns:
        [row_length / cp] int64.
    """
    parts, start = [], 0
    for length in (*lengths, row_length - sum(lengths)):
        assert length % (2 * cp) == 0, f"{length} tokens do not split into {2 * cp} chunks"
        chunk = length // (2 * cp)
        for position in (rank, 2 * cp - 1 - rank):
            parts.append(torch.arange(start + position * chunk, start + (position + 1) * chunk))
        start += length
    return torch.cat(parts)


def padding_mask(batch: MicroBatch, cp: int = 1, rank: int = 0) -> NDArray[np.bool_] | None:
    """Return which positions of a context-parallel rank are padding; ``None``: none. Local.

    Args:
        batch: Whole micro-batch.
        cp: Context-parallel size.
        rank: Position in the group.

    Returns:
        [T / cp] on the host.
    """
    if sum(batch.num_real) == batch.num_tokens:
        return None
    lengths = np.asarray(batch.lengths, dtype=np.int64)
    start = lengths.cumsum() - lengths
    border = np.zeros(batch.num_tokens + 1, dtype=np.int64)
    np.add.at(border, start, 1)
    np.add.at(border, start + np.asarray(batch.num_real, dtype=np.int64), -1)
    padding = border.cumsum()[:-1] == 0
    if cp > 1:
        padding = padding[context_index(batch.lengths, batch.num_tokens, cp, rank).numpy()]
    return padding if padding.any() else None


def split_context(batch: MicroBatch, cp: int, rank: int) -> MicroBatch:
    """Return the part of a micro-batch that a context-parallel rank computes. Local.

    Targets are already shifted, so no token loses its successor at a border. ``lengths`` stay those
    of the whole row.
    """
    if cp == 1:
        return batch
    index = context_index(batch.lengths, batch.num_tokens, cp, rank).to(batch.token_ids.device)
    mask = batch.loss_mask[index]
    places = mask.nonzero()[:, 0]
    trained = (batch.loss_mask.cumsum(0) - 1)[index[places]]
    return replace(
        batch,
        token_ids=batch.token_ids[index],
        positions=batch.positions[index],
        targets=batch.targets[index],
        loss_mask=mask,
        trained=places.int(),
        sequence_of=batch.sequence_of[trained],
        trained_index=trained.int(),
        columns={name: values[trained] for name, values in batch.columns.items()},
    )
