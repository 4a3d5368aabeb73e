"""CANN's fused attention of packed pieces on Ascend NPUs, in its layout TND.

Operators and semantic: torch_npu's ``npu_fusion_attention``. ``sparse_mode`` 3 is causal from the
lower right corner of every piece and takes one compressed mask of 2048 x 2048, whatever the
lengths; ends of pieces are lists on the host. Computed by the emulator's references in
tests/ascend; not executed on a device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from mindspeed_rl.attention.packed_plan import Borders

_MASK_SIZE = 2048
# The operator takes at most so many pieces; more are computed by several calls.
MAX_PIECES = 1024
# Each softmax statistic lies in memory this many times.
_COPIES = 8


@dataclass(frozen=True, slots=True)
class TndKernel:
    """CANN's fused attention; its methods are those of a ``PackedKernel``.

    Attributes:
        max_pieces: The most pieces of one call of the operator.
    """

    max_pieces: int = MAX_PIECES

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, borders: Borders, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend without autograd."""
        with torch.no_grad():
            found = [
                _forward(q[rows], k[columns], v[columns], part, scale)
                for part, rows, columns in _parts(borders, self.max_pieces)
            ]
        out, lse = _joined(found)
        return out, lse

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
        """Call the operator's gradient with the log-sum-exp as maximum, and 1 as the sum."""
        found = []
        for part, rows, columns in _parts(borders, self.max_pieces):
            inputs = grad[rows], q[rows], k[columns], v[columns], out[rows], lse[rows]
            found.append(_backward(*inputs, part, scale))
        dq, dk, dv = _joined(found)
        return dq, dk, dv


def _parts(borders: Borders, number: int) -> Iterator[tuple[Borders, slice, slice]]:
    """Yield the borders of so many pieces at a time, and the slices of their queries and keys."""
    if len(borders.query_ends) <= number:
        yield borders, slice(None), slice(None)
        return
    row, column = 0, 0
    for first in range(0, len(borders.query_ends), number):
        pieces, starts = slice(first, first + number), slice(first, first + number + 1)
        row_end, column_end = borders.query_ends[pieces][-1], borders.key_ends[pieces][-1]
        part = replace(
            borders,
            query_ends=tuple(end - row for end in borders.query_ends[pieces]),
            key_ends=tuple(end - column for end in borders.key_ends[pieces]),
            query_starts=borders.query_starts[starts] - row,
            key_starts=borders.key_starts[starts] - column,
        )
        yield part, slice(row, row_end), slice(column, column_end)
        row, column = row_end, column_end


def _joined(parts: Sequence[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """Return the tensors of all calls, one call after the other."""
    return parts[0] if len(parts) == 1 else tuple(map(torch.cat, zip(*parts, strict=True)))


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, borders: Borders, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the operator; see :class:`~.packed_plan.PackedKernel`."""
    out, largest, total, *_ = torch.ops.npu.npu_fusion_attention(
        q, k, v, q.size(1), "TND", scale=scale, **_pieces(borders, q.device)
    )
    lse = largest.reshape(-1, _COPIES)[:, 0] + total.reshape(-1, _COPIES)[:, 0].log()
    return out, lse[_stored(borders, q.size(1), q.device)]


def _backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    borders: Borders,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    """Call the operator's gradient; see :class:`~.packed_plan.PackedKernel`."""
    largest = torch.empty(lse.numel(), dtype=torch.float32, device=q.device)
    largest[_stored(borders, q.size(1), q.device)] = lse
    largest = largest.view(*lse.shape, 1).expand(-1, -1, _COPIES).contiguous()
    dq, dk, dv, *_ = torch.ops.npu.npu_fusion_attention_grad(
        q,
        k,
        v,
        grad.contiguous(),
        q.size(1),
        "TND",
        softmax_max=largest,
        softmax_sum=torch.ones_like(largest),
        attention_in=out.to(q.dtype).contiguous(),
        scale_value=scale,
        **_pieces(borders, q.device),
    )
    return dq, dk, dv


def _pieces(borders: Borders, device: torch.device) -> dict[str, Any]:
    """Return the arguments of borders; the mask lives as long as the call."""
    found: dict[str, Any] = {
        "actual_seq_qlen": borders.query_ends,
        "actual_seq_kvlen": borders.key_ends,
    }
    if borders.causal:
        hidden = torch.ones((_MASK_SIZE, _MASK_SIZE), dtype=torch.bool, device=device).triu_(1)
        found |= {"sparse_mode": 3, "atten_mask": hidden}
    return found


def _stored(borders: Borders, heads: int, device: torch.device) -> torch.Tensor:
    """Return [queries, n], where the statistic of each query and head is in memory.

    The operator says [queries, n, 8], and stores piece after piece, each as [n, queries, 8]:
    MindSpeed's ring attention reorders them, and newer operators have ``softmax_layout``. What
    depends on the pieces is found on the host, because an AI Core does not repeat elements.
    """
    ends = np.asarray(borders.query_ends)
    lengths = np.diff(ends, prepend=0)
    start, length = (np.repeat(x, lengths) for x in (ends - lengths, lengths))
    first = start * heads + np.arange(len(start)) - start
    of_query = torch.from_numpy(np.stack([first, length])).to(device)
    head = torch.arange(heads, device=device)
    return of_query[0][:, None] + head * of_query[1][:, None]


TND = TndKernel()
