"""Attention and rotary embedding of packed rows, on any device that has PyTorch's SDPA.

megatron-core sees a packed micro-batch as one sequence of T tokens; what depends on the borders
between sequences is here. Shapes: T tokens, n heads, d channels.

Sequences of similar length are attended to together as one dense batch padded on the right:
under a causal mask a token never sees what stands right of it, so the padding needs no mask, and
no T x T mask and no loop over sequences exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

# Sequences share a dense batch while the shortest is at least this share of the longest.
MIN_LENGTH_RATIO = 0.75


@dataclass(frozen=True, slots=True)
class DenseGroup:
    """Sequences of similar length as one right-padded batch.

    Attributes:
        index: [b, length] int64, the packed position of each element; padding repeats a
            sequence's last position.
        real: [b * length] bool, false for padding; ``None`` when there is none.
    """

    index: torch.Tensor
    real: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PackedRow:
    """The borders of a packed micro-batch; passed to megatron-core as ``packed_seq_params``.

    Attributes:
        positions: [T] int64, position within the own sequence.
        groups: dense batches that cover every token that is not padding.
        order: [T] int64, for each packed position its place in the concatenated group outputs;
            padding points at the zero row behind them.
        qkv_format: tells megatron-core not to cut the row itself.
    """

    positions: torch.Tensor
    groups: tuple[DenseGroup, ...]
    order: torch.Tensor
    qkv_format: str = "sbhd"
    cp_group: Any = None


def make_packed_row(lengths: Sequence[int], positions: torch.Tensor) -> PackedRow:
    """Group the sequences of a packed row by length. Local.

    Args:
        lengths: tokens of each sequence in order; what remains of T is padding.
        positions: [T] int64.
    """
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    by_length = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: lengths[i])
    batches: list[list[int]] = []
    for i in by_length:
        if batches and lengths[batches[-1][0]] >= MIN_LENGTH_RATIO * lengths[i]:
            batches[-1].append(i)
        else:
            batches.append([i])
    groups, packed_positions = [], []
    for batch in batches:
        width = lengths[batch[-1]]
        first = torch.tensor([starts[i] for i in batch])[:, None]
        size = torch.tensor([lengths[i] for i in batch])[:, None]
        column = torch.arange(width)[None]
        index = first + torch.minimum(column, size - 1)
        real = (column < size).flatten()
        packed_positions.append(index.flatten()[real])
        groups.append(DenseGroup(index, None if bool(real.all()) else real))
    total = int(positions.numel())
    order = torch.full((total,), starts[-1], dtype=torch.int64)
    if packed_positions:
        covered = torch.cat(packed_positions)
        order[covered] = torch.arange(covered.numel())
    return PackedRow(positions, tuple(groups), order)


class PackedSelfAttention(MegatronModule):
    """Causal self-attention within each sequence of a packed row."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
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
        """Attend. query, key, value: [T, 1, n, d] with n query or key/value heads.

        Returns:
            [T, 1, n d]; zero at padding.
        """
        if packed_seq_params is None:
            raise TypeError("PackedSelfAttention needs a PackedRow as packed_seq_params")
        q, k, v = query[:, 0], key[:, 0], value[:, 0]
        outputs = [self._attend(q, k, v, group) for group in packed_seq_params.groups]
        outputs.append(q.new_zeros(1, q.size(1), v.size(2)))
        out = torch.cat(outputs).index_select(0, packed_seq_params.order)
        return out.reshape(out.size(0), 1, -1)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: DenseGroup
    ) -> torch.Tensor:
        """One dense batch -> [tokens, n, d] without its padding."""
        shape = group.index.shape

        def dense(x: torch.Tensor) -> torch.Tensor:
            return x[group.index.flatten()].view(*shape, *x.shape[1:]).transpose(1, 2)

        out = F.scaled_dot_product_attention(
            dense(q),
            dense(k),
            dense(v),
            is_causal=True,
            scale=self.softmax_scale,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=q.size(1) != k.size(1),
        )
        out = out.transpose(1, 2).flatten(0, 1)
        return out if group.real is None else out[group.real]


class PackedRotaryEmbedding(torch.nn.Module):
    """Rotary angles by position within the own sequence.

    Stands in for megatron-core's module, which builds angles 0..T-1 and cuts them per sequence in
    a Python loop. Formula: theta_i = base^(-2 i / d), angle = position * theta_i
    (Su et al. 2021, arXiv:2104.09864), halves repeated as megatron-core expects.
    """

    def __init__(self, head_dim: int, base: float, device: torch.device) -> None:
        super().__init__()
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        self.inv_freq: torch.Tensor
        self.register_buffer("inv_freq", 1.0 / (base**exponent), persistent=False)

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Any,
        transformer_config: Any,
        packed_seq_params: PackedRow | None = None,
    ) -> PackedRow:
        """megatron-core hands the result to :meth:`forward`; here it is the row itself."""
        if packed_seq_params is None:
            raise TypeError("PackedRotaryEmbedding needs a PackedRow as packed_seq_params")
        return packed_seq_params

    def forward(
        self, row: PackedRow, packed_seq: bool = False, cp_group: Any = None
    ) -> torch.Tensor:
        """Angles [T, 1, 1, head_dim] fp32."""
        angles = row.positions.to(torch.float32)[:, None] * self.inv_freq[None]
        return torch.cat((angles, angles), dim=-1)[:, None, None]
