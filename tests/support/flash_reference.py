"""What ``torch.nn.attention.varlen`` documents, in plain PyTorch on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


class FlashReference:
    """Forward and backward of packed sequences; windows are aligned at the lower right corner."""

    groups = True  # fewer heads of keys than of queries

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor, max_q: int, max_k: int, *, return_aux: Any, scale: float,
        window_size: tuple[int, int], enable_gqa: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """The output, and the log-sum-exp as [heads, queries]."""
        assert return_aux.lse and (enable_gqa or query.size(1) == key.size(1))
        assert window_size in ((-1, 0), (-1, -1))
        out = torch.empty_like(query)
        lse = query.new_empty(query.size(1), query.size(0))
        spans = _spans(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)
        for rows, columns in spans:
            scores = _scores(query[rows], key[columns], scale, window_size == (-1, 0))
            lse[:, rows] = scores.logsumexp(-1)
            weights = scores.softmax(-1)
            out[rows] = (weights @ _repeated(value[columns], query)).transpose(0, 1)
        return out, lse

    def backward(
        self, grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        out: torch.Tensor, lse: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor,
        max_q: int, max_k: int, is_causal: bool, rng_state: torch.Tensor, scale: float,
        window_size: list[int],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """Gradients by the output and log-sum-exp that are given."""
        assert self.groups or query.size(1) == key.size(1)
        assert is_causal == (window_size == [-1, 0]) and lse.shape == out.shape[1::-1]
        assert rng_state.dtype is torch.uint64 and lse.is_contiguous()
        dq, dk, dv = (torch.zeros_like(x) for x in (query, key, value))
        for rows, columns in _spans(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k):
            weights = (
                _scores(query[rows], key[columns], scale, is_causal) - lse[:, rows, None]
            ).exp()
            over = grad_out[rows].transpose(0, 1)
            inner = over @ _repeated(value[columns], query).transpose(1, 2)
            inner -= (grad_out[rows] * out[rows]).sum(-1).t()[..., None]
            inner *= weights * scale
            dq[rows] = (inner @ _repeated(key[columns], query)).transpose(0, 1)
            for total, part in (
                (dk, inner.transpose(1, 2) @ query[rows].transpose(0, 1)),
                (dv, weights.transpose(1, 2) @ over),
            ):
                total[columns] += part.unflatten(0, (key.size(1), -1)).sum(1).transpose(0, 1)
        return dq, dk, dv


class OlderFlashReference(FlashReference):
    """As PyTorch 2.11 documents it: keys and values have as many heads as queries."""

    groups = False

    def forward(  # type: ignore[override]
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor, max_q: int, max_k: int, *, return_aux: Any = None,
        scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Without ``enable_gqa``."""
        assert scale is not None
        return super().forward(
            query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, return_aux=return_aux,
            scale=scale, window_size=window_size,
        )  # fmt: skip


def _spans(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, queries: torch.Tensor,
    keys: torch.Tensor, max_q: int, max_k: int,
) -> Iterator[tuple[slice, slice]]:  # fmt: skip
    """Queries and keys of each sequence, after the checks that the operator makes."""
    assert query.size(-1) == key.size(-1) == value.size(-1) and query.size(-1) % 8 == 0
    assert queries.dtype is keys.dtype is torch.int32 and queries.shape == keys.shape
    assert queries[0] == keys[0] == 0
    assert (int(queries[-1]), int(keys[-1])) == (query.size(0), key.size(0))
    assert max_q > 1, "1: the operator takes its path for decoding"
    assert (max_q, max_k) == (max(2, int(queries.diff().max())), int(keys.diff().max()))
    ends = zip(*(x.tolist() for x in (queries, queries[1:], keys, keys[1:])), strict=False)
    for first, end, first_key, end_key in ends:
        yield slice(first, end), slice(first_key, end_key)


def _repeated(x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """[heads of queries, tokens, channels]."""
    return x.repeat_interleave(query.size(1) // x.size(1), 1).transpose(0, 1)


def _scores(query: torch.Tensor, key: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    scores = query.transpose(0, 1) @ _repeated(key, query).transpose(1, 2) * scale
    if not causal:
        return scores
    behind = key.size(0) - query.size(0)
    hidden = torch.ones(query.size(0), key.size(0), dtype=torch.bool).triu(1 + behind)
    return scores.masked_fill(hidden, float("-inf"))
