"""Flash attention of packed pieces on CUDA: ``torch.nn.attention.varlen``.

Its causal window is aligned at the lower right corner of every piece. PyTorch 2.11 is the first
release whose function takes ``scale`` and ``window_size``; ``enable_gqa`` came later, and without
it every head of the queries has its own copy of keys and values. Not executed on a device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from mindspeed_rl.attention.packed_plan import Borders
from mindspeed_rl.core.errors import UsageError

try:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn
except ImportError as error:
    raise UsageError(
        f"torch {torch.__version__} has no torch.nn.attention.varlen, which attention in half "
        "precision needs on CUDA; install torch 2.11 or later (docs/install.md, CUDA), or train in "
        "fp32"
    ) from error

# Keys that a query sees to its left and right; -1: all.
_CAUSAL, _ALL = (-1, 0), (-1, -1)
# Where the longest piece has one query, flash attention's forward pass (``mha_varlen_fwd``) takes
# its path for decoding, which swaps queries and the heads of a group, the log-sum-exp included. The
# number of queries is an upper bound, so a larger one keeps the call on the general path.
_FEWEST_QUERIES = 2
_NEEDED = ("return_aux", "scale", "window_size")


@cache
def takes_groups(function: Callable[..., object]) -> bool:
    """Return whether a ``varlen_attn`` takes fewer heads of keys and values than of queries. Pure.

    Raises:
        UsageError: It lacks other arguments that are needed, as that of PyTorch 2.10 does.
    """
    names = inspect.signature(function).parameters
    if missing := [name for name in _NEEDED if name not in names]:
        raise UsageError(
            f"torch {torch.__version__}: torch.nn.attention.varlen.varlen_attn takes no "
            f"{' and no '.join(missing)}, which attention in half precision needs on CUDA; install "
            "torch 2.11 or later (docs/install.md, CUDA), or train in fp32"
        )
    return "enable_gqa" in names


def check_torch() -> None:
    """Refuse a PyTorch whose flash attention lacks an argument. Local.

    Raises:
        UsageError: See :func:`takes_groups`.
    """
    takes_groups(varlen_attn)


class VarlenKernel:
    """PyTorch's flash attention; its methods are those of a ``PackedKernel``."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, borders: Borders, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend without autograd; half precision."""
        grouped: dict[str, Any] = {}
        if takes_groups(varlen_attn):
            grouped["enable_gqa"] = q.size(1) != k.size(1)
        else:
            k, v = _repeated(k, q), _repeated(v, q)
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
                **grouped,
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
        heads = k.size(1)
        if not takes_groups(varlen_attn):
            k, v = _repeated(k, q), _repeated(v, q)
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
        dq, dk, dv = found
        return dq, _summed(dk, heads), _summed(dv, heads)


def _repeated(x: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Give every head of the queries a copy of its group's head: [keys, m, d] -> [keys, n, d]."""
    copies = queries.size(1) // x.size(1)
    return x if copies == 1 else x.repeat_interleave(copies, dim=1)


def _summed(grad: torch.Tensor, heads: int) -> torch.Tensor:
    """Add up the gradients of the copies of each head: [keys, n, d] -> [keys, heads, d]."""
    if grad.size(1) == heads:
        return grad
    return grad.reshape(grad.size(0), heads, -1, grad.size(2)).sum(2)


VARLEN = VarlenKernel()
