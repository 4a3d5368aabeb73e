"""The attention of packed rows as a module of megatron-core.

megatron-core sees a packed micro-batch as one sequence of T tokens; the borders between sequences
and the ranks that share them come with the row, see :mod:`mindspeed_rl.attention.rows`.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from mindspeed_rl.attention.rows import PackedRow, attend


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

        Collective: the ranks that share the row.

        Returns:
            [T, 1, n d]; zero at padding.
        """
        row = packed_seq_params
        if row is None:
            raise TypeError("PackedSelfAttention needs a PackedRow as packed_seq_params")
        q, k, v = (x[:, 0] if x.dim() == 4 else x for x in (query, key, value))
        out = attend(q, k, v, row, self.softmax_scale, self.dropout if self.training else 0.0)
        return out.reshape(out.size(0), 1, -1)
