"""Attention in dense padded batches by PyTorch's SDPA, on every device and in every precision.

Pieces of similar length are attended to together as one dense batch padded on the right: under a
causal mask a token never sees what stands right of it, so the padding needs no mask. There is no
loop over pieces and no T x T mask. Shapes: T tokens of this rank, n heads of queries, m of keys and
values, d channels, b pieces of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from mindspeed_rl.attention.pieces import NUM_KEYS, NUM_QUERIES, Pieces

# Pieces share a dense batch if the shortest has at least this fraction of the longest's length.
MIN_LENGTH_RATIO = 0.75


@dataclass(frozen=True, slots=True)
class DenseGroup:
    """Pieces of similar length as one right-padded batch.

    Attributes:
        size: Number of pieces, b.
        num_queries: Number of queries of the longest piece.
        num_keys: Number of keys of the longest piece.
        last: [b, queries] int32, the last key that each query sees; ``None``: query i sees keys
            0..i.
    """

    size: int
    num_queries: int
    num_keys: int
    last: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PaddedPlan:
    """Dense batches that cover every token that is not padding.

    Attributes:
        groups: The batches.
        queries: [sum of b x queries] int32, the local position of each query of the batches, one
            batch after the other; padding repeats the last query of its piece.
        keys: [sum of b x keys] int32, where each key is stored, in the same order.
        order: [T] int32, the index of each local position among the queries; padding has the index
            of the zero row behind them.
        padded: Whether some token of this rank is in no piece.
    """

    groups: tuple[DenseGroup, ...]
    queries: torch.Tensor
    keys: torch.Tensor
    order: torch.Tensor
    padded: bool

    def to(self, device: torch.device) -> PaddedPlan:
        """Move the indices to a device."""
        groups = tuple(
            replace(g, last=None if g.last is None else g.last.to(device)) for g in self.groups
        )
        moved = {name: getattr(self, name).to(device) for name in ("queries", "keys", "order")}
        return replace(self, groups=groups, **moved)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None,
        dropout: float = 0.0,
    ) -> torch.Tensor:
        """Attend by PyTorch's operator, with gradients; see :class:`~.kernels.AttentionPlan`."""
        if not self.groups:
            return _nothing(q, k, v)
        settings = (scale, dropout, q.size(1) != k.size(1))
        # With dropout a second computation would drop other weights.
        outputs = []
        for group, queries, keys, values in self._batches(q, k, v):
            compute = _attention if group.last is None or dropout else masked_attention
            outputs.append(compute(queries, keys, values, group.last, *settings))
        return self._in_order(outputs, q.new_zeros(1, q.size(1), v.size(2)))

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend in fp32, and return the log-sum-exp as well; see :class:`~.kernels.AttentionPlan`.

        Every batch has its scores in memory, one batch at a time.
        """
        outputs, sums = [], []
        for group, queries, keys, values in self._batches(q.float(), k.float(), v.float()):
            scores = _scores(group, queries, keys, scale)
            total = scores.logsumexp(-1, keepdim=True)
            out = (scores - total).exp() @ values[:, :, None]
            outputs.append(out.flatten(1, 2))
            sums.append(total.flatten(1, 2))
        out = self._in_order(outputs, q.new_zeros((1, q.size(1), v.size(2)), dtype=torch.float32))
        nothing = q.new_full((1, q.size(1), 1), -torch.inf, dtype=torch.float32)
        return out, self._in_order(sums, nothing).squeeze(-1)

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
        """Return fp32 gradients; see :class:`~.kernels.AttentionPlan`."""
        factor = q.size(-1) ** -0.5 if scale is None else scale
        mean = (grad.float() * out.float()).sum(-1)  # the softmax's mean of the weights' gradients
        rows = torch.cat([grad.float(), mean[..., None]], dim=-1)
        placed = rows.new_zeros(self.queries.numel() + 1, *rows.shape[1:])
        placed.index_copy_(0, self.order.long(), rows)  # padded queries keep 0
        sums = lse.index_select(0, self.queries)
        to_q, to_k, to_v, begin = [], [], [], 0
        for group, queries, keys, values in self._batches(q.float(), k.float(), v.float()):
            end = begin + group.size * group.num_queries
            over, means, total = (
                _by_key_head(_dense(group, x[begin:end]), k.size(1))
                for x in (placed[..., :-1], placed[..., -1:], sums[..., None])
            )
            begin = end
            weights = (_scores(group, queries, keys, scale) - total).exp()
            inner = over @ values[:, :, None].transpose(-1, -2)
            inner = weights * (inner - means) * factor
            to_q.append((inner @ keys[:, :, None]).flatten(1, 2))
            to_k.append((inner.transpose(-1, -2) @ _by_key_head(queries, k.size(1))).sum(2))
            to_v.append((weights.transpose(-1, -2) @ over).sum(2))
        dq = self._in_order(to_q, torch.zeros_like(q[:1], dtype=torch.float32))
        return dq, self._to_keys(to_k, k), self._to_keys(to_v, v)

    def _batches(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> Iterator[tuple[DenseGroup, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield each group with its tensors as [b, heads, tokens, channels]."""
        if not self.groups:  # the row is all padding
            return
        num_queries = [group.size * group.num_queries for group in self.groups]
        num_keys = [group.size * group.num_keys for group in self.groups]
        # index_select takes half the time of x[index], also in the backward pass.
        parts = zip(
            self.groups,
            torch.split(q.index_select(0, self.queries), num_queries),
            torch.split(k.index_select(0, self.keys), num_keys),
            torch.split(v.index_select(0, self.keys), num_keys),
            strict=True,
        )
        for group, queries, keys, values in parts:
            yield group, _dense(group, queries), _dense(group, keys), _dense(group, values)

    def _in_order(self, outputs: list[torch.Tensor], padding: torch.Tensor) -> torch.Tensor:
        """Return [T, n, ...] of dense outputs [b, n, queries, ...]; padding has the given row."""
        rows = [out.transpose(1, 2).flatten(0, 1) for out in outputs]
        if self.padded:
            rows.append(padding)
        return torch.cat(rows).index_select(0, self.order)

    def _to_keys(self, gradients: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Return the sum over dense gradients [b, m, keys, ...] of each stored key."""
        total = torch.zeros_like(like, dtype=torch.float32)
        if gradients:
            rows = torch.cat([x.transpose(1, 2).flatten(0, 1) for x in gradients])
            total.index_add_(0, self.keys, rows)
        return total


def padded_plan(pieces: Pieces) -> PaddedPlan:
    """Group the pieces of a row by length. Local."""
    total = pieces.num_tokens
    none = torch.zeros(0, dtype=torch.int64)
    groups, queries, keys, real = [], [none], [none], [torch.zeros(0, dtype=torch.bool)]
    table = pieces.table
    square = pieces.causal and bool((table[:, NUM_QUERIES] == table[:, NUM_KEYS]).all())
    for batch in _similar(table):
        group, query, key, is_real = _dense_group(torch.from_numpy(batch), square, pieces.causal)
        groups.append(group)
        queries.append(query)
        keys.append(key)
        real.append(is_real)
    query, place = torch.cat(queries), torch.cat(real).nonzero().flatten()
    order = torch.full((total,), query.numel(), dtype=torch.int64)
    order[query[place]] = place
    key = torch.cat(keys)
    stored = key if pieces.places is None else pieces.places[key]
    padded = place.numel() < total
    return PaddedPlan(tuple(groups), query.int(), stored.int(), order.int(), padded)


def _similar(table: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Sort pieces by size and group those of similar size."""
    table = table[np.lexsort((table[:, NUM_QUERIES], table[:, NUM_KEYS]))]
    smallest = MIN_LENGTH_RATIO * table[:, NUM_KEYS]  # fewest keys in a batch with this piece
    batches, begin = [], 0
    while begin < len(table):
        end = int(np.searchsorted(smallest, table[begin, NUM_KEYS], side="right"))
        batches.append(table[begin:end])
        begin = end
    return batches


def _dense_group(
    batch: torch.Tensor, square: bool, causal: bool
) -> tuple[DenseGroup, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the batch, its queries' and keys' positions, and which queries are not padding."""
    query, key, num_queries, num_keys = torch.split(batch, 1, dim=1)
    i = torch.arange(int(num_queries.max()))[None]
    j = torch.arange(int(num_keys.max()))[None]
    queries = query + torch.minimum(i, num_queries - 1)
    keys = key + torch.minimum(j, num_keys - 1)
    last = None
    if not square:
        # The queries belong to the last keys; padded queries see what the last real query sees.
        last = torch.minimum(i, num_queries - 1) if causal else torch.full_like(queries, 0)
        last = (last + num_keys - (num_queries if causal else 1)).int()
    group = DenseGroup(batch.size(0), i.size(1), j.size(1), last)
    return group, queries.flatten(), keys.flatten(), (i < num_queries).flatten()


def _dense(group: DenseGroup, rows: torch.Tensor) -> torch.Tensor:
    """Return [b, heads, tokens, ...] of the rows of a batch."""
    return rows.view(group.size, -1, *rows.shape[1:]).transpose(1, 2)


def _by_key_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Return [b, m, n / m, ...] of [b, n, ...]: heads of queries by their head of keys."""
    return x.reshape(x.size(0), heads, -1, *x.shape[2:])


def _scores(
    group: DenseGroup, queries: torch.Tensor, keys: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Return the scaled scores [b, m, n / m, queries, keys]; -inf where a query sees no key."""
    factor = queries.size(-1) ** -0.5 if scale is None else scale
    scores = (_by_key_head(queries, keys.size(1)) * factor) @ keys[:, :, None].transpose(-1, -2)
    number = torch.arange(keys.size(2), device=keys.device)
    last = number[: queries.size(2)][None] if group.last is None else group.last
    return scores.masked_fill((number > last[..., None])[:, None, None], -torch.inf)


def _attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    last: torch.Tensor | None,
    scale: float | None,
    dropout: float,
    grouped: bool,
) -> torch.Tensor:
    """Attend by PyTorch's operator. The mask, if one is needed, is made here.

    Args:
        queries: [b, n, queries, d].
        keys: [b, m, keys, d].
        values: [b, m, keys, channels of values].
        last: [b, queries] int32, the last key that each query sees; ``None``: causal.
        scale: Factor of the scores.
        dropout: Share of the weights that are dropped.
        grouped: Whether several heads of queries share a head of keys.
    """
    mask = None
    if last is not None:
        number = torch.arange(keys.size(2), dtype=last.dtype, device=last.device)
        mask = (number <= last[..., None])[:, None]
    return F.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        dropout_p=dropout,
        enable_gqa=grouped,
    )


class _MaskedAttention(torch.autograd.Function):
    """Attention that keeps no mask for its backward pass: it attends once more instead."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        ctx.save_for_backward(*inputs[:4])
        ctx.settings = inputs[4:]
        return _attention(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *inputs, last = ctx.saved_tensors
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in inputs)
            out = _attention(q, k, v, last, *ctx.settings)
        found: tuple[torch.Tensor, ...] = torch.autograd.grad(out, (q, k, v), grad)
        return (*found, None, None, None, None)


def masked_attention(*inputs: Any) -> torch.Tensor:
    """Attend as :func:`_attention` does, with the bits of its result and of its gradients."""
    out: torch.Tensor = _MaskedAttention.apply(*inputs)  # type: ignore[no-untyped-call]
    return out


class _Nothing(torch.autograd.Function):
    """The output of a row of padding: zeros, and gradients of zero whatever the inputs hold."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        q, _, v = inputs
        ctx.shapes = [x.shape for x in inputs]
        return q.new_zeros(q.size(0), q.size(1), v.size(2))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(grad.new_zeros(shape) for shape in ctx.shapes)


def _nothing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return zeros [T, n, dv] that depend on the inputs.

    The layers in front then have a backward pass as for every other row; megatron-core counts on
    their hooks when it reduces gradients during the backward pass.
    """
    out: torch.Tensor = _Nothing.apply(q, k, v)  # type: ignore[no-untyped-call]
    return out
