"""Samples from the ranks that have them to those that train on them, as the legs of a plan say.

On each leg all tensors of all samples for a rank travel as one message of 32-bit words, and all
messages of a group in one all-to-all-v. How long they are follows from the sample table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from mindspeed_rl.data.routes import Leg
from mindspeed_rl.experience.samples import Sample, SampleKey
from mindspeed_rl.experience.tensor_cache import Column, TensorCache

WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class Parcel:
    """A sample as a message knows it.

    Attributes:
        key: its name.
        version: of the weights that sampled it.
        num_tokens: of the response.
    """

    key: SampleKey
    version: int
    num_tokens: int

    @classmethod
    def of(cls, sample: Sample) -> Parcel:
        """Of a row of the sample table."""
        return cls(sample.key, sample.weights_version, sample.num_tokens)


class Wire(Protocol):
    """Carries out the collective of a leg."""

    def exchange(
        self, leg: Leg, outgoing: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        """All messages from the leg's peers, one after the other. Collective: the peers.

        Args:
            leg: which.
            outgoing: [words] int32, the messages to all peers, one after the other.
            sent: words for each peer.
            received: words from each peer.
        """
        ...


class GroupWire:
    """One all-to-all-v over a process group.

    Args:
        group_of: the group of an axis that this rank is in.
    """

    def __init__(self, group_of: Callable[[str], dist.ProcessGroup | None]) -> None:
        self._group_of = group_of
        #: what went to other ranks, and in how many collectives, since the beginning
        self.sent_bytes = 0
        self.num_collectives = 0

    def exchange(
        self, leg: Leg, outgoing: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        """See :class:`Wire`."""
        incoming = outgoing.new_empty(sum(received))
        group = self._group_of(leg.axis)
        dist.all_to_all_single(incoming, outgoing, list(received), list(sent), group=group)
        self.sent_bytes += WORD_BYTES * sum(sent)
        self.num_collectives += 1
        return incoming


class Redistribution:
    """The part of one rank in a redistribution.

    Args:
        cache: what this rank has.
        parcels: all samples, in the order of the plan.
        columns: what of them is moved.
        legs: of this rank.
    """

    def __init__(
        self,
        cache: TensorCache,
        parcels: Sequence[Parcel],
        columns: Sequence[Column],
        legs: Sequence[Leg],
    ) -> None:
        self._cache = cache
        self._parcels = parcels
        self._columns = columns
        self.legs = legs
        self._arrived: dict[int, dict[str, torch.Tensor]] = {}

    def run(self, wire: Wire) -> None:
        """Carry out all legs. Collective: the groups of the legs."""
        for leg in self.legs:
            outgoing, sent = self.outgoing(leg)
            received = [self._num_words(leg.receives.get(peer, ())) for peer in leg.peers]
            self.take(leg, wire.exchange(leg, outgoing, sent, received))

    def outgoing(self, leg: Leg) -> tuple[torch.Tensor, list[int]]:
        """The messages to all peers, and the words of each. Local.

        Raises:
            RuntimeError: a sample is not here, or not of the length that the table says.
        """
        words = [
            self._to_words(item, column)
            for peer in leg.peers
            for item in leg.sends.get(peer, ())
            for column in self._columns
        ]
        sizes = [self._num_words(leg.sends.get(peer, ())) for peer in leg.peers]
        if not words:
            return torch.empty(0, dtype=torch.int32, device=self._cache.device), sizes
        return torch.cat(words), sizes

    def take(self, leg: Leg, incoming: torch.Tensor) -> None:
        """Note what has arrived. Local."""
        items = [item for peer in leg.peers for item in leg.receives.get(peer, ())]
        places = [(item, column) for item in items for column in self._columns]
        sizes = [_words_of(c, self._parcels[item].num_tokens) for item, c in places]
        for (item, column), words in zip(places, torch.split(incoming, sizes), strict=True):
            values = words.view(column.dtype)
            if column.dtype.itemsize < WORD_BYTES:
                values = values[: self._parcels[item].num_tokens * column.width]
            assert item not in self._arrived or column.name not in self._arrived[item], item
            self._arrived.setdefault(item, {})[column.name] = values

    def read(self, item: int, column: Column) -> torch.Tensor:
        """[tokens x width] of a sample that this rank had or received. Do not write to it."""
        if item in self._arrived:
            return self._arrived[item][column.name]
        parcel = self._parcels[item]
        return self._cache.read(column, parcel.key, parcel.version)

    def keep(self) -> None:
        """Put what has arrived into the cache. Local."""
        for item, tensors in self._arrived.items():
            parcel = self._parcels[item]
            for column in self._columns:
                self._cache.put_one(column, parcel.key, parcel.version, tensors[column.name])
        self._arrived = {}

    def _to_words(self, item: int, column: Column) -> torch.Tensor:
        values = self.read(item, column)
        parcel = self._parcels[item]
        if values.numel() != parcel.num_tokens * column.width:
            raise RuntimeError(
                f"{column.name!r} of sample {parcel.key.number} of step {parcel.key.step} has "
                f"{values.numel()} elements; the table says {parcel.num_tokens} tokens x "
                f"{column.width}"
            )
        if column.dtype.itemsize == WORD_BYTES:
            return values.view(torch.int32)
        total = _words_of(column, parcel.num_tokens) * WORD_BYTES
        padded = torch.zeros(total, dtype=torch.uint8, device=values.device)
        padded[: column.num_bytes(parcel.num_tokens)] = values.view(torch.uint8)
        return padded.view(torch.int32)

    def _num_words(self, items: Sequence[int]) -> int:
        return sum(num_words(self._columns, self._parcels[item].num_tokens) for item in items)


def _words_of(column: Column, num_tokens: int) -> int:
    return -(-column.num_bytes(num_tokens) // WORD_BYTES)


def num_words(columns: Sequence[Column], num_tokens: int) -> int:
    """32-bit words of a sample on the wire. Pure."""
    return sum(_words_of(column, num_tokens) for column in columns)
