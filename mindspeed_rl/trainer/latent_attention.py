"""The replicated down projection that latent attention needs under tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig


class DuplicatedLinear(torch.nn.Module):
    """A linear layer whose weight every tensor-parallel rank holds whole.

    Without Transformer Engine megatron-core cuts the down projections of latent attention. The
    gradient of the shared rotary key is then not summed over the ranks, an error that the loss does
    not show. With sequence parallelism each rank projects its own tokens; the weight's
    ``sequence_parallel`` mark makes megatron-core sum its gradient.
    """

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **unused: object
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.empty(output_size, input_size, dtype=config.params_dtype)
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Project [..., in] to [..., out], and return no bias."""
        return F.linear(x, self.weight), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the weight as a replicated tensor of a distributed checkpoint."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        state = self.state_dict(prefix="", keep_vars=True)
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, {}, sharded_offsets
        )
        return sharded
