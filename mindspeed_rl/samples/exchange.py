"""The exchange of samples between ranks, as the hops of a plan prescribe.

On each hop all tensors of all samples for a rank travel as one message of 32-bit words, and all
messages of a group in one all-to-all-v. The lengths of messages follow from the sample table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from mindspeed_rl.samples.columns import WORD_BYTES, Column
from mindspeed_rl.samples.device_cache import SamplePart, TensorCache, as_words, join
from mindspeed_rl.samples.rollout_info import RolloutInfo
from mindspeed_rl.samples.routes import Hop


class Redistribution:
    """The part of one rank in a redistribution.

    Args:
        cache: Cache with the samples that this rank has.
        samples: All samples, in the order of the plan.
        columns: Columns that are moved.
        hops: Hops of this rank.
    """

    def __init__(
        self,
        cache: TensorCache,
        samples: Sequence[RolloutInfo],
        columns: Sequence[Column],
        hops: Sequence[Hop],
    ) -> None:
        self._cache = cache
        self._samples = samples
        self._columns = columns
        self.hops = hops
        #: Bytes sent to other ranks.
        self.sent_bytes = 0
        #: For each column, the samples that have arrived.
        self._arrived: dict[str, dict[int, SamplePart]] = {column.name: {} for column in columns}
        self._num_words = sample_words(columns, samples)

    def run(self, group_of: Callable[[str], dist.ProcessGroup | None]) -> None:
        """Carry out all hops, each as one all-to-all-v. Collective: the groups of the hops.

        Args:
            group_of: Function that returns this rank's process group along an axis.
        """
        for hop in self.hops:
            outgoing, sent = self.outgoing(hop)
            received = self._sizes(hop, hop.receives)
            incoming = outgoing.new_empty(sum(received))
            group = group_of(hop.axis)
            dist.all_to_all_single(incoming, outgoing, received, sent, group=group)
            self.sent_bytes += WORD_BYTES * sum(sent)
            self.take(hop, incoming)

    def outgoing(self, hop: Hop) -> tuple[torch.Tensor, list[int]]:
        """Return the messages to all peers, and the words of each. Local.

        Raises:
            RuntimeError: A sample is missing, or differs in length from the sample table.
        """
        views: list[torch.Tensor] = []
        for peer in hop.peers:
            items = hop.sends.get(peer, ())
            for column in self._columns if items else ():
                views += as_words(column, self._parts(items, column))
        sizes = self._sizes(hop, hop.sends)
        if not views:
            return torch.empty(0, dtype=torch.int32, device=self._cache.device), sizes
        return torch.cat(views), sizes

    def take(self, hop: Hop, incoming: torch.Tensor) -> None:
        """Record what has arrived: from each peer all samples, column after column. Local."""
        start = 0
        for peer in hop.peers:
            for column in self._columns:
                arrived = self._arrived[column.name]
                for item in hop.receives.get(peer, ()):
                    assert item not in arrived, f"sample {item} arrives twice"
                    num_tokens = self._samples[item].num_tokens
                    arrived[item] = SamplePart(incoming, start, num_tokens)
                    start += column.num_words(num_tokens)
        assert start == incoming.numel(), f"{incoming.numel()} words arrived, {start} expected"

    def read(self, item: int, column: Column) -> torch.Tensor:
        """Return a sample that this rank had or received: [tokens x width]. Do not write to it."""
        return self._parts([item], column)[0].of(column)

    def read_all(self, items: Sequence[int], column: Column) -> torch.Tensor:
        """Concatenate several samples: [sum of tokens x width]; see :meth:`read`."""
        return join(column, self._parts(items, column), self._cache.device)

    def keep(self) -> None:
        """Put what has arrived into the cache. Local."""
        for column in self._columns:
            arrived = self._arrived[column.name]
            samples = [self._samples[item] for item in arrived]
            keys, versions = [s.key for s in samples], [s.weights_version for s in samples]
            self._cache.put_parts(column, keys, versions, list(arrived.values()))
            arrived.clear()

    def _parts(self, items: Sequence[int], column: Column) -> list[SamplePart]:
        """Return where the tensors of samples are.

        Raises:
            RuntimeError: A sample is missing, or differs in length from the sample table.
        """
        arrived = self._arrived[column.name]
        parts = []
        for item in items:
            part, sample = arrived.get(item), self._samples[item]
            if part is None:
                part = self._cache.find(column, sample.key, sample.weights_version)
            if part.num_tokens != sample.num_tokens:
                raise RuntimeError(
                    f"{column.name!r} of sample {sample.key.number} of step {sample.key.step} has "
                    f"{part.num_tokens} tokens; the table says {sample.num_tokens}"
                )
            parts.append(part)
        return parts

    def _sizes(self, hop: Hop, items: Mapping[int, Sequence[int]]) -> list[int]:
        """Return the words of each peer's message."""
        return [sum(self._num_words[i] for i in items.get(peer, ())) for peer in hop.peers]


def sample_words(columns: Sequence[Column], samples: Sequence[RolloutInfo]) -> list[int]:
    """Return the 32-bit words that each sample has on the wire. Pure."""
    lengths = {s.num_tokens for s in samples}
    words = {length: sum(column.num_words(length) for column in columns) for length in lengths}
    return [words[s.num_tokens] for s in samples]
