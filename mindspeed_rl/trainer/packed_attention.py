"""Attention of packed rows, on any device that has PyTorch's SDPA.

megatron-core sees a packed micro-batch as one sequence of T tokens; what depends on the borders
between sequences is here. Shapes: T tokens of this rank, n heads, d channels.

Sequences of similar length are attended to together as one dense batch padded on the right:
under a causal mask a token never sees what stands right of it, so the padding needs no mask, and
no T x T mask and no loop over sequences exist.

Under context parallelism a rank holds two of ``2 cp`` chunks of every sequence (zigzag, see
:func:`~mindspeed_rl.data.packing.context_index`); keys and values are gathered, and each chunk
attends to the part of its sequence that ends with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from mindspeed_rl.data.packing import context_index

# Sequences share a dense batch while the shortest is at least this share of the longest.
MIN_LENGTH_RATIO = 0.75


@dataclass(frozen=True, slots=True)
class DenseGroup:
    """Pieces of similar length as one right-padded batch.

    Attributes:
        query: [b, length] int64, the local position of each query; padding repeats the last one.
        key: [b, key length] int64, the position of each key in the whole row.
        mask: [b, 1, length, key length] bool; ``None``: query i sees keys 0..i.
        real: [b * length] bool, false for padding; ``None`` when there is none.
    """

    query: torch.Tensor
    key: torch.Tensor
    mask: torch.Tensor | None
    real: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PackedRow:
    """The borders of a packed micro-batch; passed to megatron-core as ``packed_seq_params``.

    Attributes:
        positions: [T] int64, position within the own sequence.
        groups: dense batches that cover every token that is not padding.
        order: [T] int64, for each local position its place in the concatenated group outputs;
            padding points at the zero row behind them.
        padded: whether there is padding.
        gathered: [cp T] int64, for each position of the whole row its place in what the ranks of
            the context-parallel group give together; ``None`` without context parallelism.
        qkv_format: tells megatron-core not to cut the row itself.
    """

    positions: torch.Tensor
    groups: tuple[DenseGroup, ...]
    order: torch.Tensor
    padded: bool
    gathered: torch.Tensor | None = None
    qkv_format: str = "sbhd"
    cp_group: Any = None
    local_cp_size: int | None = None

    def to(self, device: torch.device) -> PackedRow:
        """The same on a device."""
        if device.type == "cpu":
            return self

        def move(x: torch.Tensor | None) -> Any:
            return None if x is None else x.to(device)

        groups = tuple(
            DenseGroup(move(g.query), move(g.key), move(g.mask), move(g.real)) for g in self.groups
        )
        gathered = move(self.gathered)
        return PackedRow(move(self.positions), groups, move(self.order), self.padded, gathered)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive queries (local start) and the keys from the start of their sequence."""

    query: int
    key: int
    num_queries: int
    num_keys: int


def make_packed_row(
    lengths: Sequence[int], positions: torch.Tensor, cp: int = 1, cp_rank: int = 0
) -> PackedRow:
    """Group the sequences of a packed row by length. Local.

    Args:
        lengths: tokens of each sequence in order, multiples of ``2 cp``; what remains of the row
            is padding.
        positions: [T] int64, of this rank's tokens.
        cp: context-parallel size.
        cp_rank: position in the context-parallel group.
    """
    pieces = _pieces(lengths, cp, cp_rank)
    groups, covered = [], []
    for batch in _batches(pieces):
        groups.append(_dense_group(batch, masked=cp > 1))
        group = groups[-1]
        flat = group.query.flatten()
        covered.append(flat if group.real is None else flat[group.real])
    total = int(positions.numel())
    num_covered = sum(int(c.numel()) for c in covered)
    order = torch.full((total,), num_covered, dtype=torch.int64)
    if covered:
        order[torch.cat(covered)] = torch.arange(num_covered)
    gathered = None
    if cp > 1:
        index = torch.cat([context_index(lengths, total * cp, cp, rank) for rank in range(cp)])
        gathered = torch.empty_like(index)
        gathered[index] = torch.arange(total * cp)
    return PackedRow(positions, tuple(groups), order, num_covered < total, gathered)


def _pieces(lengths: Sequence[int], cp: int, cp_rank: int) -> list[_Piece]:
    result, local, start = [], 0, 0
    for length in lengths:
        chunk = length if cp == 1 else length // (2 * cp)
        for end in (length,) if cp == 1 else ((cp_rank + 1) * chunk, (2 * cp - cp_rank) * chunk):
            if chunk:
                result.append(_Piece(local, start, chunk, end))
            local += chunk
        start += length
    return result


def _batches(pieces: list[_Piece]) -> list[list[_Piece]]:
    """Pieces of similar size together, ascending."""
    batches: list[list[_Piece]] = []
    for piece in sorted(pieces, key=lambda p: (p.num_keys, p.num_queries)):
        if batches and batches[-1][0].num_keys >= MIN_LENGTH_RATIO * piece.num_keys:
            batches[-1].append(piece)
        else:
            batches.append([piece])
    return batches


def _dense_group(batch: list[_Piece], masked: bool) -> DenseGroup:
    def column(name: str) -> torch.Tensor:
        return torch.tensor([getattr(piece, name) for piece in batch])[:, None]

    num_queries, num_keys = column("num_queries"), column("num_keys")
    i = torch.arange(int(num_queries.max()))[None]
    j = torch.arange(int(num_keys.max()))[None]
    query = column("query") + torch.minimum(i, num_queries - 1)
    key = column("key") + torch.minimum(j, num_keys - 1)
    real = (i < num_queries).flatten()
    mask = None
    if masked:
        # queries are the last of their keys; padded queries see what the last real one sees
        last = torch.minimum(i, num_queries - 1) + num_keys - num_queries
        mask = (j[:, None] <= last[..., None])[:, None]
    return DenseGroup(query, key, mask, None if bool(real.all()) else real)


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
        """Attend. query, key, value: [T, 1, n, d], or [T, n, d] from latent attention.

        Returns:
            [T, 1, n d]; zero at padding.
        """
        row = packed_seq_params
        if row is None:
            raise TypeError("PackedSelfAttention needs a PackedRow as packed_seq_params")
        q, k, v = (x[:, 0] if x.dim() == 4 else x for x in (query, key, value))
        if row.gathered is not None:
            k, v = _gather_row(k, v, row.gathered)
        outputs = [self._attend(q, k, v, group) for group in row.groups]
        if row.padded:
            outputs.append(q.new_zeros(1, q.size(1), v.size(2)))
        out = torch.cat(outputs).index_select(0, row.order)
        return out.reshape(out.size(0), 1, -1)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: DenseGroup
    ) -> torch.Tensor:
        """One dense batch -> [tokens, n, d] without its padding."""

        def dense(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            rows = x.index_select(0, index.flatten())  # half the time of x[index], back as well
            return rows.view(*index.shape, *x.shape[1:]).transpose(1, 2)

        out = F.scaled_dot_product_attention(
            dense(q, group.query),
            dense(k, group.key),
            dense(v, group.key),
            attn_mask=group.mask,
            is_causal=group.mask is None,
            scale=self.softmax_scale,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=q.size(1) != k.size(1),
        )
        out = out.transpose(1, 2).flatten(0, 1)
        return out if group.real is None else out[group.real]


def _gather_row(
    k: torch.Tensor, v: torch.Tensor, order: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the whole row in its order. Collective: the context-parallel group.

    The backward pass sums the gradients of all ranks.
    """
    group = parallel_state.get_context_parallel_group()
    both = torch.cat([k, v], dim=-1).contiguous()
    whole = gather_from_sequence_parallel_region(both, group=group).index_select(0, order)
    keys, values = whole.split([k.size(-1), v.size(-1)], dim=-1)
    return keys, values
