"""Ragged tensors of samples on the device of the rank that made or received them.

Nothing is padded and nothing comes back to the host: what a stage makes of a sample stays where it
is, under the sample's key, until the step is over or a redistribution takes it along.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from mindspeed_rl.experience.samples import SampleKey


@dataclass(frozen=True, slots=True)
class Column:
    """A tensor that samples have: so many numbers for each of its tokens.

    Attributes:
        name: of it.
        dtype: of its elements.
        width: elements per token.
    """

    name: str
    dtype: torch.dtype
    width: int = 1

    def num_bytes(self, num_tokens: int) -> int:
        """Of a sample of so many tokens."""
        return num_tokens * self.width * self.dtype.itemsize


#: ids of the response; ``~t`` for a token ``t`` that an environment wrote, which is negative
TOKENS = Column("tokens", torch.int32)
#: the engine's log-prob of each token
LOGPROBS = Column("logprobs", torch.float32)


class TensorCache:
    """The tensors of samples on this rank, by step and sample. Local.

    An entry is written once and never changed: a key that exists is refused, and whoever reads
    names the version of the weights that the entry must come from, so that neither a tensor of an
    earlier step nor one of earlier weights can be taken for a present one.

    Args:
        device: where tensors are kept.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.step = 0
        self._entries: dict[tuple[str, SampleKey], dict[int, torch.Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        """Of all entries."""
        versions = (tensor for entry in self._entries.values() for tensor in entry.values())
        return sum(tensor.numel() * tensor.element_size() for tensor in versions)

    def begin_step(self, step: int, keep: Collection[SampleKey] = ()) -> None:
        """Drop everything but the samples in ``keep``, which are carried over.

        ``keep`` may name samples of other ranks: every rank keeps those that it has.

        Raises:
            RuntimeError: the step is not a later one.
        """
        if step <= self.step:
            raise RuntimeError(f"step {step} cannot begin after step {self.step}")
        kept = set(keep)
        # a view would keep the tensors of all samples that came with it
        self._entries = {
            (name, key): {version: tensor.clone() for version, tensor in entry.items()}
            for (name, key), entry in self._entries.items()
            if key in kept
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
        """Store a tensor of several samples: one copy to the device.

        Args:
            column: which tensor.
            keys: of the samples.
            values: [sum of tokens x width], those of one sample after those of another.
            lengths: tokens of each sample.
            versions: of the weights that each comes from.

        Raises:
            RuntimeError: a sample has this tensor already, or is of a step that is over.
        """
        moved = values.to(self.device, column.dtype)
        parts = torch.split(moved, [n * column.width for n in lengths])
        for key, version, part in zip(keys, versions, parts, strict=True):
            self.put_one(column, key, version, part)

    def put_one(self, column: Column, key: SampleKey, version: int, values: torch.Tensor) -> None:
        """Store a tensor that is on the device already; see :meth:`put`."""
        assert values.dtype is column.dtype and values.device.type == self.device.type, column
        if key.step > self.step:
            raise RuntimeError(f"{_name(column, key)}: step {key.step} has not begun")
        entry = self._entries.setdefault((column.name, key), {})
        if version in entry:
            raise RuntimeError(
                f"{_name(column, key)} of version {version} is written twice: entries never change"
            )
        entry[version] = values

    def has(self, column: Column, key: SampleKey, version: int) -> bool:
        """Whether this rank has it."""
        return version in self._entries.get((column.name, key), ())

    def read(self, column: Column, key: SampleKey, version: int) -> torch.Tensor:
        """[tokens x width] of one sample. Do not write to it.

        Raises:
            RuntimeError: it is not here: of a step that is over, of other weights, of other ranks.
        """
        entry = self._entries.get((column.name, key), {})
        if version in entry:
            return entry[version]
        if entry:
            why = f"the cache has version {', '.join(map(str, sorted(entry)))}"
        elif key.step < self.step:
            why = f"it was not carried over into step {self.step}"
        else:
            why = "this rank neither made nor received it"
        raise RuntimeError(f"{_name(column, key)} of version {version} cannot be read: {why}")


def _name(column: Column, key: SampleKey) -> str:
    return f"{column.name!r} of sample {key.number} of step {key.step}"
