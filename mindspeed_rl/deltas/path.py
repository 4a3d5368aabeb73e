"""The path of the weights into the engine on which only what changed travels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.deltas.messages import DeltaCounts, DeltaExchange
from mindspeed_rl.metrics.metric_set import Mean, MetricSet
from mindspeed_rl.weights.exchange import copy_within
from mindspeed_rl.weights.executor import Resharder, wire_dtype
from mindspeed_rl.weights.sync import WeightPath, WeightReceiver
from mindspeed_rl.weights.traffic import RankTraffic

NO_VERSION = -1
# Bytes of what a rank tells about a damaged message.
_TOLD_BYTES = 400


class SentWeights:
    """What this rank sent in the latest sync, with which the next one is compared.

    A parameter of the trainer of which any part is sent is kept whole, in the type of the wire.

    Args:
        resharder: Reshard whose messages are compared.
        device: Device that keeps the copies.
    """

    def __init__(self, resharder: Resharder, device: torch.device) -> None:
        self._dtypes = {
            name: wire_dtype(part.dtype, resharder.dtype)
            for part in resharder.rounds
            for hop in part.hops
            for transfers in hop.sends.values()
            for transfer in transfers
            for name in transfer.src_params
        }
        self._device = device
        self.params: dict[str, torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the copies; 0 before the first sync."""
        return sum(param.nbytes for param in self.params.values())

    def update(self, read: Mapping[str, torch.Tensor]) -> None:
        """Copy the trainer's parameters. Local."""
        for name, dtype in self._dtypes.items():
            if name not in self.params:
                shape = read[name].shape
                self.params[name] = torch.empty(shape, dtype=dtype, device=self._device)
            self.params[name].copy_(read[name].detach())


class DeltaResharder:
    """A reshard that moves only what changed between ranks that hold the same version.

    The sender compares its weights with what it sent in the latest sync, and the receiver applies
    the difference to what the engine holds. A pair of ranks does so only if the sender's copies and
    the receiver's engine have the version that the latest sync left; other pairs, and all of them
    where :meth:`agree` is given a reason, move all words.

    Args:
        resharder: Reshard that moves all words, without a relay.
        rank: Global rank.
        device: Device that keeps what was sent.
        log: Function that shows a line once, called on all ranks.

    Attributes:
        sent: Copies of what was sent in the latest sync.
        counts: What the latest sync moved.

    Raises:
        UsageError: The reshard relays messages within nodes.
    """

    def __init__(
        self,
        resharder: Resharder,
        rank: int,
        device: torch.device,
        log: Callable[[str], None],
    ) -> None:
        if any(len(part.hops) > 1 for part in resharder.rounds):
            raise UsageError(
                "--reshard-deltas: a relay forwards what it has just received, of which no rank "
                "keeps a copy; give --reshard-relay off"
            )
        self._resharder, self._rank, self._log = resharder, rank, log
        self.sent = SentWeights(resharder, device)
        self._version = NO_VERSION
        self._peers: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())
        self._dense = True
        self.counts = DeltaCounts()

    @property
    def kept_bytes(self) -> int:
        """Bytes of the copies of what was sent."""
        return self.sent.num_bytes

    def agree(self, held: Sequence[int], keeps_bits: bool, why_all: str) -> bool:
        """Decide which pairs of ranks move only what changed. Collective: the transport's ranks.

        Args:
            held: Version of the weights that each rank's engine holds.
            keeps_bits: Whether this rank's engine still has the bits that the latest sync wrote.
            why_all: Reason to move all words; empty: there is none. Equal on all ranks.

        Returns:
            Whether any pair of ranks moves only what changed; equal on all ranks.
        """
        mine, self._version = self._version, NO_VERSION
        message = mine.to_bytes(8, "little", signed=True) + bytes([keeps_bits])
        answers = self._resharder.transport.all_gather(message)
        kept = [int.from_bytes(answer[:8], "little", signed=True) for answer in answers]
        keeps = [bool(answer[8]) for answer in answers]
        held = [version if keep else NO_VERSION for version, keep in zip(held, keeps, strict=True)]
        ranks = range(len(kept))
        self._peers = (
            frozenset(r for r in ranks if not why_all and _same(kept[self._rank], held[r])),
            frozenset(r for r in ranks if not why_all and _same(kept[r], held[self._rank])),
        )
        self._dense = bool(why_all) or not (set(kept) & set(held)) - {NO_VERSION}
        if line := _told(kept, held, keeps, why_all):
            self._log(line)
        return not self._dense

    @torch.no_grad()
    def run(self, read: Mapping[str, torch.Tensor], write: Mapping[str, torch.Tensor]) -> None:
        """Move the weights, after :meth:`agree`. Collective: the transport's ranks.

        Where any rank receives a damaged head or code, all of them learn it before the next
        messages are sent, and move all words.

        Args:
            read: Source parameters of this rank by name.
            write: Target parameters of this rank by name.

        Raises:
            RuntimeError: Some ranks have another plan.
        """
        traffic = self._resharder.traffic
        self.counts = DeltaCounts()
        if self._dense or not self._run_rounds(read, write):
            self.counts.sent_bytes += traffic.send_bytes
            self.counts.received_bytes += traffic.receive_bytes
            self._resharder.run(read, write)
        self.sent.update(read)

    def _run_rounds(
        self, read: Mapping[str, torch.Tensor], write: Mapping[str, torch.Tensor]
    ) -> bool:
        """Move changes and return whether all arrived; end on all ranks where some did not."""
        resharder, (coded_to, coded_from) = self._resharder, self._peers
        resharder.compare_plans()
        on_the_way: DeltaExchange | None = None
        for part in resharder.rounds:
            exchange = DeltaExchange(
                part,
                wire_dtype(part.dtype, resharder.dtype),
                resharder.transport,
                write,
                self.sent.params,
                coded_to=coded_to,
                coded_from=coded_from,
                counts=self.counts,
            )
            exchange.post(read)
            copy_within(part.copies, read, write)
            damage = on_the_way.finish() if on_the_way is not None else ""
            if self._any_damaged(exchange.read_heads() or damage):
                return False
            exchange.send()
            on_the_way = exchange
        return on_the_way is None or not self._any_damaged(on_the_way.finish())

    def _any_damaged(self, damage: str) -> bool:
        """Tell whether any rank received something damaged. Collective: the transport's ranks.

        Args:
            damage: What is wrong with what this rank received; empty: nothing is.
        """
        gather = self._resharder.transport.all_gather
        odd = [rank for rank, flag in enumerate(gather(bytes([bool(damage)]))) if flag != b"\0"]
        if odd:
            told = damage.encode(errors="replace")[:_TOLD_BYTES].ljust(_TOLD_BYTES)
            why = gather(told)[odd[0]].decode(errors="replace").strip()
            self._log(
                f"warning: reshard: changes arrived damaged on ranks {_listed(odd)}; all weights "
                f"follow. The first: {why}"
            )
        return bool(odd)

    def finished(self, version: int) -> None:
        """Note that all engines hold ``version``, as their proof said. Local."""
        self._version = version

    @property
    def traffic(self) -> RankTraffic:
        """The bytes that this rank moved in the latest sync."""
        counts = self.counts
        return replace(
            self._resharder.traffic,
            send_bytes=counts.sent_bytes,
            receive_bytes=counts.received_bytes,
        )

    def metrics(self) -> MetricSet:
        """Return the metrics of the latest sync on this rank."""
        counts, all_bytes = self.counts, float(self._resharder.traffic.send_bytes)
        return MetricSet(
            {
                "reshard/changed_share": Mean(float(counts.changed), float(counts.words)),
                "reshard/bytes_of_all": Mean(float(counts.sent_bytes), all_bytes),
            }
        )


def _same(kept: int, held: int) -> bool:
    return kept == held != NO_VERSION


def _told(kept: Sequence[int], held: Sequence[int], keeps: Sequence[bool], why_all: str) -> str:
    """Return the line about what moves whole; empty: nothing does."""
    if why_all:
        return f"reshard: all weights are sent, not only what changed: {why_all}"
    parts = []
    if repacking := [rank for rank, keep in enumerate(keeps) if not keep]:
        parts.append(f"the engines of ranks {_listed(repacking)} repack weights in place")
    version = max((*kept, *held))
    for who, versions in (("copies of what was sent", kept), ("weights", held)):
        odd = [rank for rank, v in enumerate(versions) if v != version and keeps[rank]]
        if odd:
            parts.append(f"ranks {_listed(odd)} do not have {who} of version {version}")
    if not parts:
        return ""
    return "reshard: to or from some ranks all weights are sent: " + "; ".join(parts)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:5])) + (f", ... ({len(ranks)})" if len(ranks) > 5 else "")


def delta_path(deltas: DeltaResharder) -> WeightPath:
    """Return the path on which only what changed travels."""

    def move(read: Mapping[str, torch.Tensor], engine: WeightReceiver) -> None:
        deltas.run(read, engine.weight_views())

    return WeightPath("direct", move, deltas.traffic, deltas)
