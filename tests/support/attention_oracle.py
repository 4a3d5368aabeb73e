"""Causal attention within the sequences of a packed row, one sequence at a time, in fp64.

It shares no code with the product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def attention_of_row(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], scale: float
) -> torch.Tensor:
    """[T, n, dv] fp64 of [T, n, d], [T, m, d] and [T, m, dv]; zero at padding. Has gradients."""
    copies = q.size(1) // k.size(1)
    parts, start = [], 0
    for length in lengths:
        rows = slice(start, start + length)
        queries = q[rows].double()
        keys, values = (x[rows].double().repeat_interleave(copies, 1) for x in (k, v))
        scores = torch.einsum("qnd,knd->nqk", queries, keys) * scale
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        parts.append(torch.einsum("nqk,knd->qnd", weights, values))
        start += length
    parts.append(q.new_zeros(q.size(0) - start, q.size(1), v.size(2), dtype=torch.float64))
    return torch.cat(parts)
