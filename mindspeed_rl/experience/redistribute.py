"""Samples from the ranks that have them to those that train on them, as the legs of a plan say.

On each leg all tensors of all samples for a rank travel as one message of 32-bit words, and all
messages of a group in one all-to-all-v. How long they are follows from the sample table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from mindspeed_rl.data.routes import Leg
from mindspeed_rl.experience.samples import Sample, SampleKey
from mindspeed_rl.experience.tensor_cache import WORD_BYTES, Column, TensorCache


class Parcel(NamedTuple):
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
        self._arrived: dict[int, _Arrived] = {}
        sizes = {n: num_words(columns, n) for n in {p.num_tokens for p in parcels}}
        self._num_words = [sizes[p.num_tokens] for p in parcels]

    def run(self, wire: Wire) -> None:
        """Carry out all legs. Collective: the groups of the legs."""
        for leg in self.legs:
            outgoing, sent = self.outgoing(leg)
            received = self._sizes(leg, leg.receives)
            self.take(leg, wire.exchange(leg, outgoing, sent, received))

    def outgoing(self, leg: Leg) -> tuple[torch.Tensor, list[int]]:
        """The messages to all peers, and the words of each. Local.

        Raises:
            RuntimeError: a sample is not here, or not of the length that the table says.
        """
        parts: list[torch.Tensor] = []
        for peer in leg.peers:
            for item in leg.sends.get(peer, ()):
                if item in self._arrived:
                    buffer, start = self._arrived[item]
                    parts.append(buffer[start : start + self._num_words[item]])
                else:
                    parts += [self._to_words(item, column) for column in self._columns]
        sizes = self._sizes(leg, leg.sends)
        if not parts:
            return torch.empty(0, dtype=torch.int32, device=self._cache.device), sizes
        return torch.cat(parts), sizes

    def take(self, leg: Leg, incoming: torch.Tensor) -> None:
        """Note what has arrived. Local."""
        start = 0
        for peer in leg.peers:
            for item in leg.receives.get(peer, ()):
                assert item not in self._arrived, f"sample {item} arrives twice"
                self._arrived[item] = _Arrived(incoming, start)
                start += self._num_words[item]
        assert start == incoming.numel(), f"{incoming.numel()} words arrived, {start} expected"

    def read(self, item: int, column: Column) -> torch.Tensor:
        """[tokens x width] of a sample that this rank had or received. Do not write to it."""
        parcel = self._parcels[item]
        if item not in self._arrived:
            return self._cache.read(column, parcel.key, parcel.version)
        buffer, start = self._arrived[item]
        start += num_words(self._columns[: self._columns.index(column)], parcel.num_tokens)
        words = buffer[start : start + column.num_words(parcel.num_tokens)]
        return words.view(column.dtype)[: parcel.num_tokens * column.width]

    def read_all(self, items: Sequence[int], column: Column) -> torch.Tensor:
        """[sum of tokens x width] of several samples, one after the other; see :meth:`read`."""
        if any(item in self._arrived for item in items):
            return torch.cat([self.read(item, column) for item in items])
        parcels = [self._parcels[item] for item in items]
        return self._cache.read_all(column, [(p.key, p.version) for p in parcels])

    def keep(self) -> None:
        """Put what has arrived into the cache. Local."""
        for item, (words, start) in self._arrived.items():
            parcel = self._parcels[item]
            for column in self._columns:
                self._cache.put_words(
                    column, parcel.key, parcel.version, words, start, parcel.num_tokens
                )
                start += column.num_words(parcel.num_tokens)
        self._arrived = {}

    def _to_words(self, item: int, column: Column) -> torch.Tensor:
        parcel = self._parcels[item]
        values = self._cache.read(column, parcel.key, parcel.version)
        if values.numel() != parcel.num_tokens * column.width:
            raise RuntimeError(
                f"{column.name!r} of sample {parcel.key.number} of step {parcel.key.step} has "
                f"{values.numel()} elements; the table says {parcel.num_tokens} tokens x "
                f"{column.width}"
            )
        if column.dtype.itemsize == WORD_BYTES:
            return values.view(torch.int32)
        total = column.num_words(parcel.num_tokens) * WORD_BYTES
        padded = torch.zeros(total, dtype=torch.uint8, device=values.device)
        padded[: column.num_bytes(parcel.num_tokens)] = values.view(torch.uint8)
        return padded.view(torch.int32)

    def _sizes(self, leg: Leg, items: Mapping[int, Sequence[int]]) -> list[int]:
        """Words of the message of each peer."""
        return [sum(self._num_words[i] for i in items.get(peer, ())) for peer in leg.peers]


class _Arrived(NamedTuple):
    """A sample within what came on a leg: its columns follow each other.

    Attributes:
        words: [all of the leg] int32.
        start: of the sample.
    """

    words: torch.Tensor
    start: int


def num_words(columns: Sequence[Column], num_tokens: int) -> int:
    """32-bit words of a sample on the wire. Pure."""
    return sum(column.num_words(num_tokens) for column in columns)
