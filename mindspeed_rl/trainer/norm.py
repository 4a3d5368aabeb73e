"""RMSNorm for devices without Transformer Engine."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.Module):
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467).

    megatron-core's own fallback refuses sequence parallelism. This class marks its weight so that
    ``finalize_model_grads`` sums its gradient over the tensor-parallel group.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: object
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of ``x`` [..., hidden]."""
        return F.rms_norm(x, (x.size(-1),), self.weight, self.eps)
