"""A cache of ragged sample tensors on the device of the rank that made or received them.

Nothing is padded and nothing is copied back to the host. What a stage computes for a sample stays
on the device, under the sample's key, until the step is over or a redistribution moves it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from mindspeed_rl.samples.columns import WORD_BYTES, Column
from mindspeed_rl.samples.rollout_info import SampleKey


class SamplePart(NamedTuple):
    """The tensor of one sample within a buffer that holds those of several samples.

    Views are made when they are read, because there are many more samples than reads.

    Attributes:
        buffer: Flat; 32-bit words, or of the column's type if its elements are of another size.
        start: Index of the sample's first element in the buffer.
        num_tokens: Tokens of the sample.
    """

    buffer: torch.Tensor
    start: int
    num_tokens: int

    def of(self, column: Column) -> torch.Tensor:
        """Return a view of the sample's elements."""
        size = self.num_tokens * column.width
        if self.buffer.dtype is column.dtype:
            return self.buffer[self.start : self.start + size]
        words = self.buffer[self.start : self.start + column.num_words(self.num_tokens)]
        return words.view(column.dtype)[:size]

    def words_of(self, column: Column) -> torch.Tensor:
        """Return the sample as words, padded with zeros; a view where the buffer is of words."""
        if self.buffer.dtype is torch.int32:
            return self.buffer[self.start : self.start + column.num_words(self.num_tokens)]
        total = column.num_words(self.num_tokens) * WORD_BYTES
        padded = torch.zeros(total, dtype=torch.uint8, device=self.buffer.device)
        padded[: column.num_bytes(self.num_tokens)] = self.of(column).view(torch.uint8)
        return padded.view(torch.int32)


def as_words(column: Column, parts: Iterable[SamplePart]) -> list[torch.Tensor]:
    """Return the words of samples in order, in as few views as their places allow.

    Samples that are adjacent in a buffer become one view, as most samples of one engine do.
    """
    if column.dtype.itemsize != WORD_BYTES:
        return [part.words_of(column) for part in parts]
    views: list[torch.Tensor] = []
    buffer, begin, end, width = None, 0, 0, column.width
    for here, start, num_tokens in parts:
        if here is not buffer or start != end:
            if buffer is not None:
                views.append(buffer[begin:end])
            buffer, begin, end = here, start, start
        end += num_tokens * width
    return views if buffer is None else [*views, buffer[begin:end]]


def join(column: Column, parts: Sequence[SamplePart], device: torch.device) -> torch.Tensor:
    """Concatenate the values of several samples, one after another: [sum of tokens x width]."""
    if not parts:
        return torch.empty(0, dtype=column.dtype, device=device)
    if column.dtype.itemsize == WORD_BYTES:
        return torch.cat(as_words(column, parts)).view(column.dtype)
    return torch.cat([part.of(column) for part in parts])


class TensorCache:
    """The tensors of samples on this rank, by step and sample. Local.

    An entry is written once and never changed, and a key that exists is refused. A reader names the
    version of the weights that the entry must come from, so that a tensor of an earlier step or of
    earlier weights cannot be taken for a present one.

    Args:
        device: Device that keeps the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.step = 0
        self._carried: frozenset[SampleKey] = frozenset()
        #: Bytes of all entries.
        self.num_bytes = 0
        self._columns: dict[str, Column] = {}
        self._entries: dict[str, dict[SampleKey, dict[int, SamplePart]]] = {}

    def clear(self) -> None:
        """Drop everything, so that any step may begin. Local."""
        self.step, self._carried, self.num_bytes = 0, frozenset(), 0
        self._entries = {}

    def begin_step(self, step: int, keep: Collection[SampleKey] = ()) -> None:
        """Drop everything but the samples in ``keep``, which are carried over.

        ``keep`` may name samples of other ranks: every rank keeps those that it has.

        Raises:
            RuntimeError: The step is not a later one.
        """
        if step <= self.step:
            raise RuntimeError(f"step {step} cannot begin after step {self.step}")
        self._carried = frozenset(keep)
        self.num_bytes = 0
        for name, entries in self._entries.items():
            column = self._columns[name]
            self._entries[name] = {
                key: {version: self._alone(column, part) for version, part in parts.items()}
                for key, parts in entries.items()
                if key in self._carried
            }
        self.step = step

    def put(
        self,
        column: Column,
        keys: Sequence[SampleKey],
        values: torch.Tensor,
        lengths: Sequence[int],
        versions: Sequence[int],
    ) -> None:
        """Store a tensor of several samples, with one copy to the device.

        Args:
            column: Column that the values belong to.
            keys: Keys of the samples.
            values: [sum of tokens x width], sample after sample.
            lengths: Tokens of each sample.
            versions: Version of the weights that each sample comes from.

        Raises:
            RuntimeError: A sample has this tensor already, or is neither of the present step nor
                carried over into it.
        """
        moved = _as_kept(column, values.to(self.device, column.dtype))
        sizes = (length * column.width for length in lengths)
        *starts, end = accumulate(sizes, initial=0)
        assert end == moved.numel(), f"{column.name}: {moved.numel()} elements, {end} expected"
        parts = [SamplePart(moved, at, length) for at, length in zip(starts, lengths, strict=True)]
        self.put_parts(column, keys, versions, parts)

    def put_parts(
        self,
        column: Column,
        keys: Sequence[SampleKey],
        versions: Sequence[int],
        parts: Sequence[SamplePart],
    ) -> None:
        """Store tensors that are on the device already; see :meth:`put`."""
        known = self._columns.setdefault(column.name, column)
        assert known is column or known == column, "two columns of one name"
        entries = self._entries.setdefault(column.name, {})
        for key, version, part in zip(keys, versions, parts, strict=True):
            if key.step > self.step:
                raise RuntimeError(f"{_name(column, key)}: step {key.step} has not begun")
            if key.step < self.step and key not in self._carried:
                raise RuntimeError(
                    f"{_name(column, key)} is written too late: it was not carried over into step "
                    f"{self.step}"
                )
            entry = entries.get(key)
            if entry is None:
                entries[key] = {version: part}
            elif version in entry:
                raise RuntimeError(
                    f"{_name(column, key)} of version {version} is written twice: entries never "
                    "change"
                )
            else:
                entry[version] = part
            self.num_bytes += column.num_bytes(part.num_tokens)

    def _alone(self, column: Column, part: SamplePart) -> SamplePart:
        """Copy a part, so that the rest of its buffer can be freed."""
        self.num_bytes += column.num_bytes(part.num_tokens)
        return SamplePart(_as_kept(column, part.of(column).clone()), 0, part.num_tokens)

    def read(self, column: Column, key: SampleKey, version: int) -> torch.Tensor:
        """Return one sample's values: [tokens x width]. They must not be written to.

        Raises:
            RuntimeError: It is missing: of a step that is over, of other weights, of other ranks.
        """
        return self.find(column, key, version).of(column)

    def find(self, column: Column, key: SampleKey, version: int) -> SamplePart:
        """Return where the tensor of one sample is; see :meth:`read`."""
        entry = self._entries.get(column.name, {}).get(key, {})
        if version in entry:
            return entry[version]
        if entry:
            why = f"the cache has version {', '.join(map(str, sorted(entry)))}"
        elif key.step < self.step:
            why = f"it was not carried over into step {self.step}"
        else:
            why = "this rank neither made nor received it"
        raise RuntimeError(f"{_name(column, key)} of version {version} cannot be read: {why}")


def _as_kept(column: Column, values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32) if column.dtype.itemsize == WORD_BYTES else values


def _name(column: Column, key: SampleKey) -> str:
    return f"{column.name!r} of sample {key.number} of step {key.step}"
