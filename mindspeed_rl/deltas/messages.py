"""One round of a reshard that moves only what changed: heads first, then coded messages.

A message that both ends code has a :class:`~mindspeed_rl.deltas.codec.PieceHead` per piece, in an
exchange of its own whose sizes follow from the plan. They say how many bytes of the message follow.
All other messages travel as their words.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mindspeed_rl.deltas.codec import (
    HEAD_BYTES,
    HEAD_INTS,
    DamagedMessageError,
    PieceHead,
    decode,
    encode,
    pieces_of,
)
from mindspeed_rl.weights.exchange import (
    Params,
    Round,
    copy_rectangles,
    copy_within,
    source_views,
    spans,
    target_views,
)
from mindspeed_rl.weights.planner import Transfer
from mindspeed_rl.weights.transports import Pending, Transport

# Smaller messages are not coded: a head must be less than a hundredth of what it may save.
LEAST_BYTES = 100 * HEAD_BYTES
_WORDS = {2: torch.int16, 4: torch.int32}
Views = Callable[[Transfer], Sequence[torch.Tensor]]


def is_coded(transfers: Iterable[Transfer], item_bytes: int) -> bool:
    """Tell whether a message is coded where its ends hold the same version. Pure."""
    size = sum(t.num_elements for t in transfers) * item_bytes
    return item_bytes in _WORDS and size >= LEAST_BYTES


@dataclass(slots=True)
class DeltaCounts:
    """What the rounds of a sync moved, on one rank.

    Attributes:
        sent_bytes: Bytes that left, heads included.
        received_bytes: Bytes that came, heads included.
        words: Words of the messages that were coded here.
        changed: Those of them that changed; all those of a piece that travelled as its words.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    words: int = 0
    changed: int = 0


@dataclass(slots=True)
class _Message:
    """A message of a round.

    Attributes:
        transfers: What it carries, in the order of both ends.
        pieces: Words of each piece; empty: the message is not coded.
        heads: The pieces' heads, once they are known.
        buffer: [bytes] uint8 of the message on the wire.
    """

    transfers: Sequence[Transfer]
    pieces: Sequence[int] = ()
    heads: Sequence[PieceHead] = ()
    buffer: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))


class DeltaExchange:
    """A round in flight. Its methods are called in order: post, read_heads, send, finish.

    A rank with a damaged head does not know how much comes next, so that all ranks have to agree
    that there is none before any of them sends.

    Args:
        part: The round; it has no relay.
        dtype: Element type on the wire.
        transport: Transport that moves heads and messages.
        write: Target parameters, which hold what the latest sync wrote.
        kept: What this rank sent then, by name of the source parameter; type as on the wire.
        coded_to: Ranks that hold what ``kept`` has.
        coded_from: Ranks whose ``kept`` this rank holds.
        counts: What the rounds moved is added to it.
    """

    def __init__(
        self,
        part: Round,
        dtype: torch.dtype,
        transport: Transport,
        write: Params,
        kept: Params,
        *,
        coded_to: Collection[int],
        coded_from: Collection[int],
        counts: DeltaCounts,
    ) -> None:
        (hop,) = part.hops
        self._part, self._dtype, self._transport = part, dtype, transport
        self._write, self._kept, self._counts = write, kept, counts
        self._sends = {p: self._message(t, p in coded_to) for p, t in hop.sends.items()}
        self._receives = {p: self._message(t, p in coded_from) for p, t in hop.receives.items()}
        self._incoming: dict[int, torch.Tensor] = {}
        self._pending: Pending | None = None

    def _message(self, transfers: Sequence[Transfer], same_version: bool) -> _Message:
        if not same_version or not is_coded(transfers, self._dtype.itemsize):
            return _Message(transfers)
        return _Message(transfers, pieces_of(sum(t.num_elements for t in transfers)))

    def post(self, read: Params) -> None:
        """Code what this rank sends, and start to exchange heads. Collective with the others."""
        room = sum(self._most_bytes(message) for message in self._sends.values())
        memory = torch.empty(room, dtype=torch.uint8, device=self._transport.device)
        used = 0
        sizes = []
        for message in self._sends.values():
            end = self._pack(message, read, memory, used)
            sizes.append(end - used)
            used = end
        # Messages live until the round is finished; few of their bytes are left where few changed.
        coded = memory[:used].clone() if 2 * used <= room else memory[:used]
        del memory
        buffers = torch.split(coded, sizes) if sizes else ()
        for message, buffer in zip(self._sends.values(), buffers, strict=True):
            message.buffer = buffer
        heads = {p: m.heads for p, m in self._sends.items() if m.pieces}
        outgoing = _table([head.row() for of_peer in heads.values() for head in of_peer])
        device = self._transport.device
        sends = _parts(outgoing.to(device), {p: len(heads[p]) for p in heads})
        expected = {p: len(m.pieces) for p, m in self._receives.items() if m.pieces}
        incoming = torch.empty(HEAD_INTS * sum(expected.values()), dtype=torch.int32, device=device)
        self._incoming = _parts(incoming, expected)
        self._pending = self._start(sends, self._incoming, torch.int32)

    def _most_bytes(self, message: _Message) -> int:
        size = sum(t.num_elements for t in message.transfers) * self._dtype.itemsize
        return size + 4 * max(1, len(message.pieces))  # each is aligned

    def _pack(self, message: _Message, read: Params, memory: torch.Tensor, start: int) -> int:
        """Write a message into the memory that travels and return where it ends."""
        new = self._flat(message.transfers, lambda t: source_views(read, t))
        end = start
        if message.pieces:
            old = self._flat(message.transfers, lambda t: source_views(self._kept, t))
            heads = []
            parts = (torch.split(words, list(message.pieces)) for words in (old, new))
            for before, after in zip(*parts, strict=True):
                head, code = encode(before, after)
                memory[end : end + len(code)] = code
                end += len(code)
                heads.append(head)
                self._count(head, len(after))
            message.heads = heads
        else:
            end += new.nbytes
            memory[start:end] = new.view(torch.uint8)
            memory[end : end + -end % 4] = 0
            end += -end % 4
        return end

    def _count(self, head: PieceHead, num_words: int) -> None:
        counts = self._counts
        counts.words += num_words
        counts.changed += num_words if head.is_plain else head.changed

    def _flat(self, transfers: Sequence[Transfer], views_of: Views) -> torch.Tensor:
        """Return the elements of a message as words: [elements] int16 or int32."""
        count = sum(t.num_elements for t in transfers)
        values = torch.empty(count, dtype=self._dtype, device=self._transport.device)
        for t, span in spans(values, transfers):
            copy_rectangles((span,), views_of(t))
        return values.view(_WORDS[self._dtype.itemsize])

    def read_heads(self) -> str:
        """Receive the heads. Collective with the others.

        Returns:
            What is wrong with one of them; empty: nothing is, and the messages may be sent.
        """
        self._wait()
        for peer, ints in self._incoming.items():
            message = self._receives[peer]
            rows = ints.view(-1, HEAD_INTS).tolist()
            try:
                pairs = zip(rows, message.pieces, strict=True)
                message.heads = [PieceHead.of_row(row, num_words) for row, num_words in pairs]
            except DamagedMessageError as error:
                return f"from rank {peer}: {error}"
        return ""

    def send(self) -> None:
        """Start to exchange messages, whose heads are sound on all ranks. Collective."""
        sizes = {peer: self._num_bytes(message) for peer, message in self._receives.items()}
        memory = torch.empty(sum(sizes.values()), dtype=torch.uint8, device=self._transport.device)
        for message, buffer in zip(
            self._receives.values(), torch.split(memory, list(sizes.values())), strict=True
        ):
            message.buffer = buffer
        sends, receives = (
            {peer: message.buffer for peer, message in side.items() if len(message.buffer)}
            for side in (self._sends, self._receives)
        )
        self._pending = self._start(sends, receives, torch.uint8)

    def _num_bytes(self, message: _Message) -> int:
        """Return the bytes of a message that is about to come."""
        item = self._dtype.itemsize
        if message.pieces:
            pairs = zip(message.heads, message.pieces, strict=True)
            return sum(head.num_bytes(num_words, item) for head, num_words in pairs)
        size = sum(t.num_elements for t in message.transfers) * item
        return size + -size % 4

    def finish(self) -> str:
        """Receive the messages and write what they carry. Collective with the others.

        Returns:
            What is wrong with one of them; empty: nothing is. It and all after it are not written.
        """
        self._wait()
        for peer, message in self._receives.items():
            if message.pieces:
                words = self._flat(message.transfers, lambda t: target_views(self._write, t))
                try:
                    self._decode(message, words)
                except DamagedMessageError as error:
                    return f"from rank {peer}: {error}"
                values = words.view(self._dtype)
            else:
                size = sum(t.num_elements for t in message.transfers) * self._dtype.itemsize
                values = message.buffer[:size].view(self._dtype)
            for t, span in spans(values, message.transfers):
                copy_rectangles(target_views(self._write, t), (span,))
        copy_within(self._part.local_duplicates, self._write, self._write)
        return ""

    def _decode(self, message: _Message, words: torch.Tensor) -> None:
        pairs = list(zip(message.heads, message.pieces, strict=True))
        item = self._dtype.itemsize
        sizes = [head.num_bytes(num_words, item) for head, num_words in pairs]
        codes = torch.split(message.buffer, sizes)
        parts = torch.split(words, list(message.pieces))
        for (head, _), code, part in zip(pairs, codes, parts, strict=True):
            decode(head, code, part)

    def _start(
        self,
        sends: Mapping[int, torch.Tensor],
        receives: Mapping[int, torch.Tensor],
        dtype: torch.dtype,
    ) -> Pending:
        self._counts.sent_bytes += sum(m.nbytes for m in sends.values())
        self._counts.received_bytes += sum(m.nbytes for m in receives.values())
        return self._transport.start(
            {peer: [m] for peer, m in sends.items()},
            {peer: [m] for peer, m in receives.items()},
            dtype,
        )

    def _wait(self) -> None:
        assert self._pending is not None
        self._pending.wait()


def _table(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32).flatten()


def _parts(ints: torch.Tensor, pieces: Mapping[int, int]) -> dict[int, torch.Tensor]:
    """Cut the heads of all peers by peer."""
    sizes = [HEAD_INTS * count for count in pieces.values()]
    return dict(zip(pieces, torch.split(ints, sizes) if sizes else (), strict=True))
