"""Execution of one round of a reshard: packing, sending, receiving and unpacking its messages.

An :class:`Exchange` packs small rectangles into staging memory. Large contiguous rectangles are
sent directly from, and received directly into, the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from mindspeed_rl.weights.planner import Place, Transfer
from mindspeed_rl.weights.transports import Pending, Tensors, Transport

Messages = Mapping[int, tuple[Transfer, ...]]
Params = Mapping[str, torch.Tensor]
# The transfers to copy into or out of the memory that travels, and this memory.
Message = tuple[Sequence[Transfer], torch.Tensor]

ALIGNMENT_BYTES = 16  # Alignment of the received part of the staging memory, after the sent part.


@dataclass(frozen=True, slots=True)
class RankMessages:
    """Messages that one rank sends and receives in one exchange, by ascending peer."""

    sends: Messages
    receives: Messages

    def packed_bytes(self, item_bytes: int) -> tuple[int, int]:
        """Return the bytes of all sent and of all received messages, each packed."""
        sent, received = (
            sum(t.num_elements for part in messages.values() for t in part) * item_bytes
            for messages in (self.sends, self.receives)
        )
        return sent, received

    def staging_bytes(self, item_bytes: int) -> int:
        """Return the bytes that both directions need when every message is packed."""
        sent, received = self.packed_bytes(item_bytes)
        return _aligned(sent) + received


@dataclass(frozen=True, slots=True)
class Round:
    """One rank's part of one round; its tensors have one element type.

    Attributes:
        hops: One exchange, or two with a relay.
        copies: Transfers within the rank, from the source to the target parameters.
        local_duplicates: Copies within the target of rectangles that the rank keeps twice.
        names: HF tensors that are complete after this round.
        dtype: Declared element type; empty: that of the model.
    """

    hops: tuple[RankMessages, ...]
    copies: tuple[Transfer, ...]
    local_duplicates: tuple[Transfer, ...]
    names: tuple[str, ...]
    dtype: str


class Exchange:
    """A round in flight, together with its staging memory.

    Args:
        part: The round.
        staging: [bytes] memory for the packed messages.
        dtype: Element type on the wire.
        transport: Transport that moves the messages.
        write: Target parameters; messages may arrive in them as soon as the round is posted.
        alone_bytes: From this size on, a rectangle is a message of its own if possible.
    """

    def __init__(
        self,
        part: Round,
        staging: torch.Tensor,
        dtype: torch.dtype,
        transport: Transport,
        write: Params,
        alone_bytes: float,
    ) -> None:
        self._round = part
        self._alone = alone_bytes / dtype.itemsize if transport.many_messages else None
        self._staging = staging
        self._dtype = dtype
        self._transport = transport
        self._write = write
        self._pending: Pending | None = None
        self._arriving: list[Message] = []

    def post(self, hop: int, read: Params) -> None:
        """Pack the messages of a hop and start sending them."""
        part = self._round.hops[hop]
        sent, received = part.packed_bytes(self._dtype.itemsize)
        start = _aligned(sent)
        outgoing = shared_view(self._staging[:sent], self._dtype)
        incoming = shared_view(self._staging[start : start + received], self._dtype)
        sends = self._messages(part.sends, outgoing, lambda t: source_views(read, t))
        receives = self._messages(part.receives, incoming, lambda t: target_views(self._write, t))
        for transfers, flat in (m for several in sends.values() for m in several):
            for t, span in spans(flat, transfers):
                copy_rectangles((span,), source_views(read, t))
        self._arriving = [m for several in receives.values() for m in several]
        self._pending = self._transport.start(_tensors(sends), _tensors(receives), self._dtype)

    def _messages(
        self,
        of_peers: Messages,
        buffer: torch.Tensor,
        views_of: Callable[[Transfer], Sequence[torch.Tensor]],
    ) -> dict[int, list[Message]]:
        """Cut the transfers of each peer into messages.

        A message lists the transfers that still have to be copied into or out of its memory, and
        that memory. Where the transport allows it, a large rectangle that is contiguous and has the
        right type travels without packing; its list of transfers is then empty. Both ends cut
        alike, but each looks at its own memory.
        """
        result: dict[int, list[Message]] = {}
        used = 0
        alone = self._alone
        for peer, transfers in of_peers.items():
            messages = result.setdefault(peer, [])
            for together in _cut(transfers, alone):
                size = sum(t.num_elements for t in together)
                if alone is not None and size >= alone and len(together) == 1:
                    view, *others = views_of(together[0])
                    if not others and view.is_contiguous() and view.dtype is self._dtype:
                        messages.append(((), shared_view(view, (-1,))))
                        continue
                messages.append((together, buffer[used : used + size]))
                used += size
        return result

    def finish(self, after_round: Callable[[Round], None] | None) -> None:
        """Receive and unpack all messages, including the second hop of a relay."""
        self._take()
        for hop in range(1, len(self._round.hops)):
            self.post(hop, self._write)
            self._take()
        copy_within(self._round.local_duplicates, self._write, self._write)
        if after_round is not None:
            after_round(self._round)

    def _take(self) -> None:
        assert self._pending is not None
        self._pending.wait()
        for transfers, flat in self._arriving:
            for t, span in spans(flat, transfers):
                copy_rectangles(target_views(self._write, t), (span,))


def shared_view(memory: torch.Tensor, what: torch.dtype | tuple[int, ...]) -> torch.Tensor:
    """View contiguous memory as another element type or shape, and refuse to copy it.

    MindSpeed replaces ``torch.Tensor.view`` by a function that silently copies memory with gaps. A
    message would then be packed into the copy, or would arrive in it and be lost.

    Args:
        memory: Contiguous tensor; if the element type changes, bytes that are aligned to the new
            type.
        what: Element type, or sizes, as for ``torch.Tensor.view``.

    Raises:
        RuntimeError: The result of ``torch.Tensor.view`` lies in other memory.
    """
    shown = memory.view(what)
    if shown.data_ptr() != memory.data_ptr():
        raise RuntimeError(
            "reshard: torch.Tensor.view returns copies (tensor of size "
            f"{tuple(memory.shape)}, strides {memory.stride()}): weights would be lost; remove "
            "what replaces torch.Tensor.view"
        )
    return shown


def copy_within(transfers: Iterable[Transfer], read: Params, write: Params) -> None:
    """Copy from parameter to parameter of this rank."""
    for t in transfers:
        copy_rectangles(target_views(write, t), source_views(read, t))


def source_views(params: Params, transfer: Transfer) -> tuple[torch.Tensor, ...]:
    """Return views of what a transfer reads: one per tensor, or one of all in the first dim."""
    return _views(params, transfer.src_params, transfer.rectangle.src, transfer.num_tensors)


def target_views(params: Params, transfer: Transfer) -> tuple[torch.Tensor, ...]:
    """Return views of what a transfer writes: one per tensor, or one of all in the first dim."""
    return _views(params, transfer.dst_params, transfer.rectangle.dst, transfer.num_tensors)


def _views(
    params: Params, names: Sequence[str], place: Place, count: int
) -> tuple[torch.Tensor, ...]:
    slices = place.box.slices
    if count == 1 or not place.view.index:
        return tuple(place.view.of(params[name])[slices] for name in names)
    return (place.view.of_run(params[names[0]], count)[:, *slices],)


def copy_rectangles(to: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy a run of rectangles, each side either a tensor for each or one of all. Local."""
    if len(to) < len(values):
        to = to[0].unbind()
    elif len(values) < len(to):
        values = values[0].unbind()
    for target, value in zip(to, values, strict=True):
        for stored, shown in _matrices(target, value):
            stored.copy_(shown)


def _matrices(
    target: torch.Tensor, value: torch.Tensor
) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Return what to copy for one tensor: itself, or on CPU its transposed matrices one by one.

    PyTorch's CPU transposes in blocks only where one whole matrix is written in the order of its
    memory; anything else it copies element by element, several times slower.
    """
    stored = target.mT if target.ndim in (2, 3) else target
    if stored is target or target.device.type != "cpu" or target.is_contiguous():
        return ((target, value),)
    if not stored[(0,) * (target.ndim - 2)].is_contiguous():
        return ((target, value),)
    if target.ndim == 2:
        return ((stored, value.mT),)
    return zip(stored.unbind(), value.mT.unbind(), strict=True)


def _cut(transfers: Sequence[Transfer], alone: float | None) -> list[Sequence[Transfer]]:
    """Group transfers into messages: all together, or the small ones and each large one."""
    if alone is None:
        return [transfers]
    small = [t for t in transfers if t.num_elements < alone]
    large = [[t] for t in transfers if t.num_elements >= alone]
    return [*([small] if small else []), *large]


def _tensors(of_peers: Mapping[int, list[Message]]) -> Tensors:
    return {peer: [tensor for _, tensor in several] for peer, several in of_peers.items()}


def spans(
    buffer: torch.Tensor, transfers: Sequence[Transfer]
) -> Iterable[tuple[Transfer, torch.Tensor]]:
    """Yield every transfer with its part of a buffer, in the shape of the transfer."""
    start = 0
    for t in transfers:
        yield t, shared_view(buffer[start : start + t.num_elements], t.shape)
        start += t.num_elements


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
