"""Flash attention of packed pieces on CUDA: ``torch.nn.attention.varlen``.

Its causal window is aligned at the lower right corner of every piece. Not executed on a device.
"""

from __future__ import annotations

import torch
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from mindspeed_rl.attention.packed_plan import Borders

# Keys that a query sees to its left and right; -1: all.
_CAUSAL, _ALL = (-1, 0), (-1, -1)
# Where the longest piece has one query, flash attention's forward pass (``mha_varlen_fwd``) takes
# its path for decoding, which swaps queries and the heads of a group, the log-sum-exp included. The
# number of queries is an upper bound, so a larger one keeps the call on the general path.
_FEWEST_QUERIES = 2


class VarlenKernel:
    """PyTorch's flash attention; its methods are those of a ``PackedKernel``."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, borders: Borders, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend without autograd; half precision."""
        with torch.no_grad():
            out, lse = varlen_attn(
                q.contiguous(),
                k.contiguous(),
                v.contiguous(),
                borders.query_starts,
                borders.key_starts,
                max(borders.max_queries, _FEWEST_QUERIES),
                borders.max_keys,
                return_aux=AuxRequest(lse=True),
                scale=scale,
                window_size=_CAUSAL if borders.causal else _ALL,
                enable_gqa=q.size(1) != k.size(1),
            )
        # The operator gives [n, queries], whatever the documentation of varlen_attn says.
        return out, lse.transpose(0, 1)

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
        """Call the operator that autograd of ``varlen_attn`` calls, with any log-sum-exp."""
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = (
            torch.ops.torch_attn._varlen_attn_backward(
                grad.contiguous(),
                q.contiguous(),
                k.contiguous(),
                v.contiguous(),
                out.to(q.dtype).contiguous(),
                lse.transpose(0, 1).contiguous(),
                borders.query_starts,
                borders.key_starts,
                max(borders.max_queries, _FEWEST_QUERIES),
                borders.max_keys,
                borders.causal,
                torch.zeros(2, dtype=torch.uint64, device=q.device),  # no dropout, no random state
                scale,
                list(_CAUSAL if borders.causal else _ALL),
            )
        )
        return found


VARLEN = VarlenKernel()
