"""Attention by fused kernels that take packed pieces and their cumulative lengths, and no mask.

A :class:`PackedKernel` is given queries and keys that lie piece after piece; the plan here selects
them and puts its results back. Shapes: T tokens of this rank, n heads of queries, m of keys and
values, d channels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from mindspeed_rl.attention.pieces import KEY, NUM_KEYS, NUM_QUERIES, QUERY, Pieces
from mindspeed_rl.core.layout import round_up


@dataclass(frozen=True, slots=True)
class Borders:
    """The borders of packed pieces, as kernels want them.

    Attributes:
        query_ends: Queries up to the end of each piece, on the host.
        key_ends: Keys up to the end of each piece, on the host.
        query_starts: [pieces + 1] int32, 0 and ``query_ends`` on the device.
        key_starts: [pieces + 1] int32, 0 and ``key_ends`` on the device.
        max_queries: Queries of the longest piece.
        max_keys: Keys of the longest piece.
        causal: See :class:`~mindspeed_rl.attention.pieces.Pieces`.
    """

    query_ends: tuple[int, ...]
    key_ends: tuple[int, ...]
    query_starts: torch.Tensor
    key_starts: torch.Tensor
    max_queries: int
    max_keys: int
    causal: bool


class PackedKernel(Protocol):
    """A fused kernel; queries, keys and values have one number of channels."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, borders: Borders, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output [queries, n, d] and the log-sum-exp [queries, n] fp32. Local."""
        ...

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        borders: Borders,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of queries, keys and values. Local."""
        ...


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """Pieces for a fused kernel; its methods are those of :class:`~.kernels.AttentionPlan`.

    Attributes:
        kernel: The kernel.
        borders: Borders of the pieces.
        num_queries: Queries of all pieces.
        num_tokens: Tokens of this rank, T.
        queries: [queries] int32, their local positions; ``None``: the first ones in order.
        keys: [keys] int32, where they are stored; ``None``: the first ones in order.
    """

    kernel: PackedKernel
    borders: Borders
    num_queries: int
    num_tokens: int
    queries: torch.Tensor | None
    keys: torch.Tensor | None

    def to(self, device: torch.device) -> PackedPlan:
        """Move indices and borders to a device."""
        starts = {n: getattr(self.borders, n).to(device) for n in ("query_starts", "key_starts")}
        queries, keys = (None if x is None else x.to(device) for x in (self.queries, self.keys))
        return replace(self, borders=replace(self.borders, **starts), queries=queries, keys=keys)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None,
        dropout: float = 0.0,
    ) -> torch.Tensor:
        """Attend with gradients. Keeps the inputs, the output and the log-sum-exp."""
        assert not dropout, "fused kernels drop no weights"
        out: torch.Tensor = _Attention.apply(q, k, v, self, scale)  # type: ignore[no-untyped-call]
        return out

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend, and return the log-sum-exp as well."""
        out = q.new_zeros(q.size(0), q.size(1), v.size(2))
        lse = q.new_full((q.size(0), q.size(1)), -torch.inf, dtype=torch.float32)
        if not self.num_queries:
            return out, lse
        queries, keys, values = _equal_channels(*self._selected(q, k, v))
        found, sums = self.kernel.forward(queries, keys, values, self.borders, _factor(q, scale))
        # What is kept for the backward pass has no padded channels: contiguous() drops them.
        out = self._placed(found[..., : v.size(2)], out).contiguous()
        return out, self._placed(sums, lse)

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        scale: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients from these pieces."""
        if not self.num_queries:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        mine = [_select(x, self.queries, self.num_queries) for x in (grad, out, lse)]
        queries, keys, values, *padded = _equal_channels(*self._selected(q, k, v), *mine[:2])
        dq, dk, dv = self.kernel.backward(
            padded[0], queries, keys, values, padded[1], mine[2], self.borders, _factor(q, scale)
        )
        dq = self._placed(dq[..., : q.size(2)], torch.zeros_like(q))
        dk, dv = (_added(x[..., : like.size(2)], self.keys, like) for x, like in ((dk, k), (dv, v)))
        return dq, dk, dv

    def _selected(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values piece after piece."""
        num_keys = self.borders.key_ends[-1]
        keys, values = (_select(x, self.keys, num_keys) for x in (k, v))
        return _select(q, self.queries, self.num_queries), keys, values

    def _placed(self, rows: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """Put the rows of the queries into a tensor of all tokens; without padding it is theirs."""
        if self.queries is not None:
            return whole.index_copy_(0, self.queries.long(), rows)
        if self.num_queries == self.num_tokens:
            return rows
        whole[: self.num_queries] = rows
        return whole


def packed_plan(pieces: Pieces, kernel: PackedKernel) -> PackedPlan:
    """Prepare pieces for a fused kernel. Local."""
    table = pieces.table
    queries = _positions(table[:, QUERY], table[:, NUM_QUERIES])
    keys = _positions(table[:, KEY], table[:, NUM_KEYS])
    query_ends, key_ends = table[:, NUM_QUERIES].cumsum(), table[:, NUM_KEYS].cumsum()
    stored = None if keys is None else torch.from_numpy(keys).int()
    if pieces.places is not None:
        number = int(key_ends[-1]) if len(table) else 0
        stored = pieces.places[:number] if stored is None else pieces.places[stored]
    borders = Borders(
        tuple(query_ends.tolist()),
        tuple(key_ends.tolist()),
        F.pad(torch.from_numpy(query_ends).int(), (1, 0)),
        F.pad(torch.from_numpy(key_ends).int(), (1, 0)),
        int(table[:, NUM_QUERIES].max(initial=0)),
        int(table[:, NUM_KEYS].max(initial=0)),
        pieces.causal,
    )
    return PackedPlan(
        kernel,
        borders,
        int(table[:, NUM_QUERIES].sum()),
        pieces.num_tokens,
        None if queries is None else torch.from_numpy(queries).int(),
        stored,
    )


def _positions(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Return the positions in runs, one run after the other; ``None``: they are 0, 1, 2, ..."""
    before = lengths.cumsum() - lengths
    if (starts == before).all():
        return None
    return np.repeat(starts - before, lengths) + np.arange(lengths.sum())


def _select(x: torch.Tensor, index: torch.Tensor | None, number: int) -> torch.Tensor:
    return x[:number] if index is None else x.index_select(0, index)


def _added(rows: torch.Tensor, index: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Return the sum of rows by their place in a tensor like another one."""
    if index is None and rows.size(0) == like.size(0):
        return rows
    whole = torch.zeros_like(like)
    if index is None:
        whole[: rows.size(0)] = rows
        return whole
    return whole.index_add_(0, index, rows.to(whole.dtype))


def _equal_channels(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Pad all tensors with zeros to the most channels, in a multiple of 8.

    Flash attention wants both; zeros change no score, and only zeros come out of values of zero.
    """
    channels = round_up(max(x.size(-1) for x in tensors), 8)
    return tuple(x if x.size(-1) == channels else _widened(x, channels) for x in tensors)


def _widened(x: torch.Tensor, channels: int) -> torch.Tensor:
    # Padding is no kernel of AI Cores, joining is.
    return torch.cat([x, x.new_zeros(*x.shape[:-1], channels - x.size(-1))], dim=-1)


def _factor(q: torch.Tensor, scale: float | None) -> float:
    return q.size(-1) ** -0.5 if scale is None else scale


class _Attention(torch.autograd.Function):
    """A fused kernel with its gradients."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        q, k, v, plan, scale = inputs
        out, lse = plan.forward(q, k, v, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.scale = plan, scale
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*ctx.plan.backward(grad, *ctx.saved_tensors, ctx.scale), None, None)
