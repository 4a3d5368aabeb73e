"""Computes rotary angles of packed rows, by position within each token's own sequence.

They replace the angles of megatron-core's modules, which go from 0 to T-1, are cut per sequence in
a Python loop, and know fewer kinds of scaling. Shapes: T tokens, d rotated channels.
"""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_rl.attention.rows import PackedRow
from mindspeed_rl.models.rope import RopeSpec


class PackedRotaryEmbedding(torch.nn.Module):
    """Rotary angles of a packed row.

    Args:
        rope: Gives the frequencies.
        rope_dim: Rotated channels of a head.
        device: Device of the frequencies.
        latent: Whether latent attention takes the angles; it needs another shape, and the factor of
            cosine and sine.
    """

    def __init__(
        self, rope: RopeSpec, rope_dim: int, device: torch.device, latent: bool = False
    ) -> None:
        super().__init__()
        frequencies = rope.inverse_frequencies(rope_dim)
        self.inv_freq: torch.Tensor
        self.register_buffer(
            "inv_freq",
            torch.tensor(frequencies, dtype=torch.float32, device=device),
            persistent=False,
        )
        self._latent = latent
        self._attention_factor = rope.attention_factor

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Any,
        transformer_config: Any,
        packed_seq_params: PackedRow | None = None,
    ) -> PackedRow:
        """Return the row itself, because megatron-core passes this result to :meth:`forward`."""
        if packed_seq_params is None:
            raise TypeError("PackedRotaryEmbedding needs a PackedRow as packed_seq_params")
        return packed_seq_params

    def forward(
        self, row: PackedRow, packed_seq: bool = False, cp_group: Any = None
    ) -> torch.Tensor | tuple[torch.Tensor, float]:
        """Return angles [T, 1, 1, d] fp32; for latent attention [T, 1, d] and the factor."""
        angles = row.positions.to(torch.float32)[:, None] * self.inv_freq[None]
        angles = torch.cat((angles, angles), dim=-1)
        if self._latent:
            return angles[:, None], self._attention_factor
        return angles[:, None, None]
