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
        trained: [N] int32, the positions in this row whose targets are trained tokens, ascending.
        trained_on_host: [N] int32, the same on the host, so that no index waits for a device.
        sequence_of: [N] int32, which of the S sequences a trained token belongs to.
        num_trained: Number of trained tokens of each of the S whole sequences.
        trained_counts: [S] fp32, the same numbers.
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
    trained_on_host: NDArray[np.int32]
    sequence_of: torch.Tensor
    num_trained: tuple[int, ...]
    trained_counts: torch.Tensor
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

    def with_states(self, name: str, values: torch.Tensor) -> MicroBatch:
        """Return a copy with a column of several numbers per token, [N, width], in any type."""
        assert values.shape[:1] == self.sequence_of.shape, f"{name} has {tuple(values.shape)}"
        return replace(self, columns={**self.columns, name: values})

    def to(self, device: torch.device) -> MicroBatch:
        """Move the micro-batch to a device."""
        tensors = {name: getattr(self, name).to(device) for name in _ROW_TENSORS}
        columns = {name: values.to(device) for name, values in self.columns.items()}
        return replace(self, columns=columns, **tensors)


_ROW_TENSORS = (
    *("token_ids", "positions", "targets", "loss_mask"),
    *("trained", "sequence_of", "trained_counts", "trained_index"),
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
    row = _row_of(samples, lengths, padded_length)
    after = [s.token_after for s in samples if s.token_after is not None]
    # What the row is made of: padding, tokens that are trained on but not read, and the sequences.
    loose = torch.tensor([0, *after], dtype=torch.int32).to(device)
    tokens = torch.cat([loose, *(s.token_ids.int() for s in samples)])
    source, next_source = _moved((row.source, row.next_source), device)
    positions, trained, sequence_of = _moved((row.positions, row.trained, row.sequence_of), device)
    num_trained = tuple(s.num_trained for s in samples)
    mask = torch.zeros(padded_length, dtype=torch.bool, device=device)
    return MicroBatch(
        token_ids=tokens.index_select(0, source),
        positions=positions,
        targets=tokens.index_select(0, next_source),
        loss_mask=mask.index_fill_(0, trained.long(), True),
        lengths=lengths,
        num_real=tuple(s.length for s in samples),
        sample_ids=tuple(s.sample_id for s in samples),
        trained=trained,
        trained_on_host=row.trained,
        sequence_of=sequence_of,
        num_trained=num_trained,
        trained_counts=torch.tensor(num_trained, dtype=torch.float32).to(device),
        trained_index=torch.arange(trained.numel(), device=device, dtype=torch.int32),
        shared_by=shared_by,
        columns=_columns_of(samples, num_trained),
    )


@dataclass(frozen=True, slots=True)
class _Row:
    """The indices of a row, int32 on the host.

    ``source`` and ``next_source`` say where the token and the target of each position are among the
    padding, the tokens after sequences, and the sequences, one after the other.
    """

    positions: NDArray[np.int32]
    source: NDArray[np.int32]
    next_source: NDArray[np.int32]
    trained: NDArray[np.int32]
    sequence_of: NDArray[np.int32]


def _row_of(samples: Sequence[TrainSample], lengths: Sequence[int], padded_length: int) -> _Row:
    length = np.asarray(lengths, dtype=np.int64)
    real = np.asarray([s.length for s in samples], dtype=np.int64)
    continues = np.asarray([s.token_after is not None for s in samples], dtype=np.int64)
    first_trained = np.asarray([s.num_prompt_tokens for s in samples], dtype=np.int64) - 1
    # For each token of the samples and their padding: its sample, its place, whether one follows.
    owner = np.repeat(np.arange(len(samples)), length)
    position = np.arange(len(owner)) - (length.cumsum() - length)[owner]
    has_target = position < (real - 1 + continues)[owner]
    first = 1 + continues.sum() + real.cumsum() - real
    source = np.where(position < real[owner], first[owner] + position, 0)
    is_last = position == (real - 1)[owner]
    next_source = np.where(is_last, continues.cumsum()[owner], source + 1) * has_target
    loss = has_target & (position >= first_trained[owner])
    for sample, start in zip(samples, accumulate(lengths, initial=0), strict=False):
        if sample.loss_mask is not None:  # The mask of token t + 1 belongs to position t.
            begin = start + sample.num_prompt_tokens - 1
            loss[begin : begin + sample.loss_mask.numel()] &= sample.loss_mask.numpy()
    trained = np.flatnonzero(loss)

    def padded(values: NDArray[np.int64]) -> NDArray[np.int32]:
        return np.pad(values, (0, padded_length - len(values))).astype(np.int32)

    return _Row(
        positions=padded(position),
        source=padded(source),
        next_source=padded(next_source),
        trained=trained.astype(np.int32),
        sequence_of=owner[trained].astype(np.int32),
    )


def _moved(indices: Sequence[NDArray[np.int32]], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return int32 indices on a device, moved in one copy."""
    whole = torch.from_numpy(np.concatenate(indices)).to(device)
    return torch.split(whole, [len(index) for index in indices])


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


def sequence_of_tokens(batch: MicroBatch, cp: int = 1, rank: int = 0) -> NDArray[np.int64]:
    """Return the index of the sequence that each token of a rank belongs to; -1: padding. Local.

    Args:
        batch: Micro-batch with the T tokens of this rank, after :func:`split_context`.
        cp: Context-parallel size.
        rank: Position in the group.

    Returns:
        [T] on the host.
    """
    owners = np.full(batch.num_tokens * cp, -1, dtype=np.int64)
    start = 0
    for index, (length, real) in enumerate(zip(batch.lengths, batch.num_real, strict=True)):
        owners[start : start + real] = index
        start += length
    if cp > 1:
        owners = owners[context_index(batch.lengths, owners.size, cp, rank).numpy()]
    return owners


def split_context(batch: MicroBatch, cp: int, rank: int) -> MicroBatch:
    """Return the part of a micro-batch that a context-parallel rank computes. Local.

    Targets are already shifted, so no token loses its successor at a border. ``lengths`` stay those
    of the whole row.
    """
    if cp == 1:
        return batch
    index = context_index(batch.lengths, batch.num_tokens, cp, rank).numpy()
    number = np.full(batch.num_tokens, -1, dtype=np.int32)
    number[batch.trained_on_host] = np.arange(len(batch.trained_on_host), dtype=np.int32)
    number = number[index]
    places = np.flatnonzero(number >= 0).astype(np.int32)
    device = batch.token_ids.device
    here, places_here, trained = _moved((index.astype(np.int32), places, number[places]), device)

    def of_row(values: torch.Tensor) -> torch.Tensor:
        return values.index_select(0, here)

    return replace(
        batch,
        token_ids=of_row(batch.token_ids),
        positions=of_row(batch.positions),
        targets=of_row(batch.targets),
        loss_mask=of_row(batch.loss_mask),
        trained=places_here,
        trained_on_host=places,
        sequence_of=batch.sequence_of.index_select(0, trained),
        trained_index=trained,
        columns={name: values.index_select(0, trained) for name, values in batch.columns.items()},
    )
