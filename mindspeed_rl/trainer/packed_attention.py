"""Attention of packed rows, on any device that has PyTorch's SDPA.

megatron-core sees a packed micro-batch as one sequence of T tokens; the code that depends on the
borders between sequences is here. Shapes: T tokens of this rank, n heads, d channels.

Sequences of similar length are attended to together as one dense batch padded on the right: under a
causal mask a token never sees what stands right of it, so the padding needs no mask. There is no
loop over sequences and no T x T mask.

Under context parallelism a rank holds two of ``2 cp`` chunks of every sequence (zigzag, see
:func:`~mindspeed_rl.samples.packing.context_index`). Keys and values are gathered, and each chunk
attends to the part of its sequence that ends with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from numpy.typing import NDArray

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.samples.packing import context_index

# Sequences share a dense batch if the shortest has at least this fraction of the longest's length.
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
class ContextGroup:
    """The ranks that share a row.

    Attributes:
        group: Their process group; ``None``: the rank is alone.
        size: Number of them.
        rank: Position of this rank among them.
    """

    group: dist.ProcessGroup | None = None
    size: int = 1
    rank: int = 0


@dataclass(frozen=True, slots=True)
class PackedRow:
    """The borders of a packed micro-batch; passed to megatron-core as ``packed_seq_params``.

    Attributes:
        positions: [T] int32, position of each token within its own sequence.
        groups: Dense batches that cover every token that is not padding.
        queries: [sum of b x queries] int32, the local position of each query of the batches, one
            batch after the other; padding repeats the last query of its piece.
        keys: [sum of b x keys] int32, the position of each key in the whole row, in the same order.
        order: [T] int32, the index of each local position among the queries; padding has the index
            of the zero row behind them.
        padded: Whether the row has padding.
        gathered: [size T] int32, the index of each position of the whole row among the gathered
            tokens of the ranks that share the row; ``None``: this rank has all of it.
        context: Ranks that share the row.
        qkv_format: Tells megatron-core not to cut the row itself.
    """

    positions: torch.Tensor
    groups: tuple[DenseGroup, ...]
    queries: torch.Tensor
    keys: torch.Tensor
    order: torch.Tensor
    padded: bool
    gathered: torch.Tensor | None = None
    context: ContextGroup = ContextGroup()
    qkv_format: str = "sbhd"
    cp_group: Any = None
    local_cp_size: int | None = None

    def to(self, device: torch.device) -> PackedRow:
        """Move the row to a device."""
        if device.type == "cpu":
            return self

        def move(x: torch.Tensor | None) -> Any:
            return None if x is None else x.to(device)

        moved = {name: move(getattr(self, name)) for name in ("positions", "queries", "keys")}
        groups = tuple(replace(g, last=move(g.last)) for g in self.groups)
        order, gathered = move(self.order), move(self.gathered)
        return replace(self, **moved, groups=groups, order=order, gathered=gathered)


def make_packed_row(
    lengths: Sequence[int], positions: torch.Tensor, context: ContextGroup = ContextGroup()
) -> PackedRow:
    """Group the sequences of a packed row by length. Local.

    Args:
        lengths: Tokens of each sequence in order, multiples of twice the size of ``context``; the
            rest of the row is padding.
        positions: [T] int32, positions of this rank's tokens.
        context: Ranks that share the row.
    """
    cp = context.size
    total = int(positions.numel())
    none = torch.zeros(0, dtype=torch.int64)
    groups, queries, keys, real = [], [none], [none], [torch.zeros(0, dtype=torch.bool)]
    for batch in _batches(_pieces(lengths, cp, context.rank)):
        group, query, key, is_real = _dense_group(torch.from_numpy(batch), masked=cp > 1)
        groups.append(group)
        queries.append(query)
        keys.append(key)
        real.append(is_real)
    query, place = torch.cat(queries), torch.cat(real).nonzero().flatten()
    order = torch.full((total,), query.numel(), dtype=torch.int64)
    order[query[place]] = place
    gathered = None
    if cp > 1:
        index = torch.cat([context_index(lengths, total * cp, cp, rank) for rank in range(cp)])
        gathered = torch.empty(total * cp, dtype=torch.int32)
        gathered[index] = torch.arange(total * cp, dtype=torch.int32)
    padded = place.numel() < total
    key = torch.cat(keys).int()
    return PackedRow(
        positions, tuple(groups), query.int(), key, order.int(), padded, gathered, context
    )


# Columns of pieces: a piece has consecutive queries from a local position on, and the keys from the
# start of their sequence to its last query.
_QUERY, _KEY, _NUM_QUERIES, _NUM_KEYS = range(4)


def _pieces(lengths: Sequence[int], cp: int, cp_rank: int) -> NDArray[np.int64]:
    """Return [pieces, 4]: one piece per sequence, or two chunks each under context parallelism."""
    length = np.asarray(lengths, dtype=np.int64)
    start = length.cumsum() - length
    if cp == 1:
        found = np.stack([start, start, length, length], axis=1)
    else:
        chunk = length // (2 * cp)
        local = 2 * (chunk.cumsum() - chunk)
        early = np.stack([local, start, chunk, (cp_rank + 1) * chunk], axis=1)
        late = np.stack([local + chunk, start, chunk, (2 * cp - cp_rank) * chunk], axis=1)
        found = np.stack([early, late], axis=1).reshape(-1, 4)
    return found[found[:, _NUM_QUERIES] > 0]


def _batches(pieces: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Sort pieces by size and group those of similar size."""
    pieces = pieces[np.lexsort((pieces[:, _NUM_QUERIES], pieces[:, _NUM_KEYS]))]
    smallest = MIN_LENGTH_RATIO * pieces[:, _NUM_KEYS]  # fewest keys in a batch with this piece
    batches, begin = [], 0
    while begin < len(pieces):
        end = int(np.searchsorted(smallest, pieces[begin, _NUM_KEYS], side="right"))
        batches.append(pieces[begin:end])
        begin = end
    return batches


def _dense_group(
    batch: torch.Tensor, masked: bool
) -> tuple[DenseGroup, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the batch, its queries' and keys' positions, and which queries are not padding."""
    query, key, num_queries, num_keys = torch.split(batch, 1, dim=1)
    i = torch.arange(int(num_queries.max()))[None]
    j = torch.arange(int(num_keys.max()))[None]
    queries = query + torch.minimum(i, num_queries - 1)
    keys = key + torch.minimum(j, num_keys - 1)
    last = None
    if masked:
        # The queries belong to the last keys; padded queries see what the last real query sees.
        last = (torch.minimum(i, num_queries - 1) + num_keys - num_queries).int()
    group = DenseGroup(batch.size(0), i.size(1), j.size(1), last)
    return group, queries.flatten(), keys.flatten(), (i < num_queries).flatten()


class PackedSelfAttention(MegatronModule):
    """Causal self-attention within each sequence of a packed row.

    ``softmax_scale`` is set by :func:`~mindspeed_rl.trainer.model.build_model`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedRow | None = None,
    ) -> torch.Tensor:
        """Attend within each sequence. query, key, value: [T, 1, n, d], or [T, n, d] if latent.

        Returns:
            [T, 1, n d]; zero at padding.
        """
        row = packed_seq_params
        if row is None:
            raise TypeError("PackedSelfAttention needs a PackedRow as packed_seq_params")
        q, k, v = (x[:, 0] if x.dim() == 4 else x for x in (query, key, value))
        if row.gathered is not None:
            k, v = _gather_row(k, v, row.gathered, row.context)
        outputs = self._attend(q, k, v, row)
        if row.padded:
            outputs.append(q.new_zeros(1, q.size(1), v.size(2)))
        out = torch.cat(outputs).index_select(0, row.order)
        return out.reshape(out.size(0), 1, -1)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row: PackedRow
    ) -> list[torch.Tensor]:
        """Return [b queries, n, d] of each dense batch, including its padding."""
        if not row.groups:  # the row is all padding
            return []
        num_queries = [group.size * group.num_queries for group in row.groups]
        num_keys = [group.size * group.num_keys for group in row.groups]
        # index_select takes half the time of x[index], also in the backward pass.
        parts = zip(
            row.groups,
            torch.split(q.index_select(0, row.queries), num_queries),
            torch.split(k.index_select(0, row.keys), num_keys),
            torch.split(v.index_select(0, row.keys), num_keys),
            strict=True,
        )
        outputs = []
        for group, *rows in parts:
            queries, keys, values = (
                x.view(group.size, -1, *x.shape[1:]).transpose(1, 2) for x in rows
            )
            dropout = self.dropout if self.training else 0.0
            settings = (self.softmax_scale, dropout, q.size(1) != k.size(1))
            # With dropout a second computation would drop other weights.
            attend = _attention if group.last is None or dropout else masked_attention
            out = attend(queries, keys, values, group.last, *settings)
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        return outputs


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
        keys: [b, heads of keys, keys, d].
        values: [b, heads of keys, keys, channels of values].
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


def _gather_row(
    k: torch.Tensor, v: torch.Tensor, order: torch.Tensor, context: ContextGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of the whole row in its order. Collective: the ranks of ``context``.

    The backward pass sums the gradients of all ranks.
    """
    both = torch.cat([k, v], dim=-1).contiguous()
    whole = gather_from_sequence_parallel_region(both, group=context.group).index_select(0, order)
    keys, values = whole.split([k.size(-1), v.size(-1)], dim=-1)
    return keys, values


PACKED_ATTENTIONS: dict[str, type[MegatronModule]] = {"padded_sdpa": PackedSelfAttention}
"""The attentions of packed rows, by the name that the features of a platform give."""


def packed_attention(name: str) -> type[MegatronModule]:
    """Return the module of an attention of packed rows.

    Raises:
        UsageError: There is no such module.
    """
    if name not in PACKED_ATTENTIONS:
        raise UsageError(
            f"--platform: the platform names {name!r} for the attention of packed rows, which has "
            f"no module; there are: {', '.join(PACKED_ATTENTIONS)}"
        )
    return PACKED_ATTENTIONS[name]
