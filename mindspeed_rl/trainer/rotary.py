"""Rotary angles of packed rows: by position within the own sequence.

Stands in for megatron-core's modules, which build angles 0..T-1 and cut them per sequence in a
Python loop, and which know fewer kinds of scaling. Shapes: T tokens, d rotated channels.
"""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.trainer.packed_attention import PackedRow


class PackedRotaryEmbedding(torch.nn.Module):
    """Angles of a packed row.

    Args:
        spec: gives the frequencies.
        device: where they live.
        latent: for latent attention: it takes another shape, and the factor of cosine and sine.
    """

    def __init__(self, spec: ModelSpec, device: torch.device, latent: bool = False) -> None:
        super().__init__()
        frequencies = spec.rope.inverse_frequencies(spec.attention.rope_dim)
        self.inv_freq: torch.Tensor
        self.register_buffer(
            "inv_freq",
            torch.tensor(frequencies, dtype=torch.float32, device=device),
            persistent=False,
        )
        self._latent = latent
        self._attention_factor = spec.rope.attention_factor

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
    ) -> torch.Tensor | tuple[torch.Tensor, float]:
        """Angles [T, 1, 1, d] fp32; for latent attention [T, 1, d] and the factor."""
        angles = row.positions.to(torch.float32)[:, None] * self.inv_freq[None]
        angles = torch.cat((angles, angles), dim=-1)
        if self._latent:
            return angles[:, None], self._attention_factor
        return angles[:, None, None]
