"""The kernels that attend to the pieces of a row, by the names that platforms give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

import torch

from mindspeed_rl.attention.packed_plan import packed_plan
from mindspeed_rl.attention.padded_sdpa import padded_plan
from mindspeed_rl.attention.pieces import Pieces
from mindspeed_rl.core.errors import UsageError

# The kernel that has no limits: every device, precision and dropout.
GENERAL = "padded_sdpa"
_HALF = (torch.bfloat16, torch.float16)


class AttentionPlan(Protocol):
    """What a kernel has prepared for some pieces; it is made once and used by every layer.

    Shapes: queries [T, n, d], keys [keys, m, d], values [keys, m, dv], with n a multiple of m;
    ``scale`` is the factor of the scores, ``None``: 1 / sqrt(d).
    """

    def to(self, device: torch.device) -> AttentionPlan:
        """Move indices to a device."""
        ...

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None,
        dropout: float = 0.0,
    ) -> torch.Tensor:
        """Return [T, n, dv], zero at tokens of no piece; autograd gives all gradients. Local."""
        ...

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output [T, n, dv] and the log-sum-exp of the scores [T, n] fp32. Local.

        Tokens of no piece have 0 and -inf. There is no autograd.
        """
        ...

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        scale: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of queries, keys and values from these pieces. Local.

        ``out`` and ``lse`` may be those over further pieces of the same queries: then gradients
        over all pieces add up to the whole (Dao 2023, arXiv:2307.08691, algorithm 2).
        """
        ...


Planner = Callable[[Pieces], AttentionPlan]


# A fused kernel is imported by its first plan: no platform needs what those of others import.
def _varlen_plan(pieces: Pieces) -> AttentionPlan:
    from mindspeed_rl.attention.varlen import VARLEN

    return packed_plan(pieces, VARLEN)


def _tnd_plan(pieces: Pieces) -> AttentionPlan:
    from mindspeed_rl.attention.tnd import TND

    return packed_plan(pieces, TND)


KERNELS: Mapping[str, Planner] = MappingProxyType(
    {GENERAL: padded_plan, "varlen": _varlen_plan, "tnd": _tnd_plan}
)


def planner(name: str, dtype: torch.dtype, dropout: float = 0.0) -> Planner:
    """Return what plans the attention of a model's rows.

    Flash attention computes in half precision only, and no fused kernel here drops weights: such
    models have the general kernel.

    Args:
        name: Kernel of the platform.
        dtype: Type of queries, keys and values.
        dropout: Share of the attention weights that are dropped in training.

    Raises:
        UsageError: There is no such kernel, or the installed PyTorch lacks what it calls.
    """
    if name not in KERNELS:
        raise UsageError(
            f"--platform: the platform names {name!r} for the attention of packed rows, which is "
            f"no kernel; there are: {', '.join(KERNELS)}"
        )
    if dropout or (name == "varlen" and dtype not in _HALF):
        name = GENERAL
    if name == "varlen":
        from mindspeed_rl.attention.varlen import check_torch

        check_torch()
    return KERNELS[name]
