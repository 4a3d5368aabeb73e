"""What the operators of torch_npu that are used here compute: references in plain torch, on CPU.

Sources: the operators' documentation in torch_npu (``_op_plugin_docs.py``). Accuracy is that of
fp32 arithmetic with one rounding at the end. ``REFERENCES`` is keyed by the operator's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

REFERENCES: dict[str, Callable[..., Any]] = {}


def _reference(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        REFERENCES.update({f"npu::{name}": function for name in names})
        return function

    return register


# --- attention --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens of one sequence as [heads, tokens, channels], and which keys a query does not see."""

    queries: slice
    keys: slice
    hidden: torch.Tensor | None


def _split_heads(x: torch.Tensor, layout: str, heads: int) -> torch.Tensor:
    """[T, heads, channels], batches one after the other."""
    if layout == "TND":
        return x.float()
    if layout == "SBH":
        return x.float().transpose(0, 1).reshape(x.shape[0] * x.shape[1], heads, -1)
    raise NotImplementedError(f"attention in the layout {layout}")


def _join_heads(x: torch.Tensor, like: torch.Tensor, layout: str) -> torch.Tensor:
    """Back to the layout and type of ``like``."""
    if layout == "SBH":
        length, batch = like.shape[:2]
        x = x.reshape(batch, length, -1).transpose(0, 1)
    return x.reshape(like.shape[:-1] + x.shape[x.dim() - 1 :]).to(like.dtype).contiguous()


def _hidden(length: int, keys: int, sparse_mode: int, mask: torch.Tensor | None) -> Any:
    if sparse_mode == 2:
        return torch.ones(length, keys, dtype=torch.bool).triu(1)
    if sparse_mode == 3:
        return torch.ones(length, keys, dtype=torch.bool).triu(1 + keys - length)
    if sparse_mode in (0, 1):
        return None if mask is None else mask.reshape(mask.shape[-2:])[:length, :keys].bool()
    raise NotImplementedError(f"attention with sparse_mode {sparse_mode}")


def _pieces(query: torch.Tensor, key: torch.Tensor, layout: str, options: Any) -> Iterator[_Piece]:
    """The sequences; empty ones are legal."""
    if layout == "TND":
        ends, key_ends = options["actual_seq_qlen"], options["actual_seq_kvlen"]
    else:
        length, keys = query.shape[0], key.shape[0]
        ends = [length * (b + 1) for b in range(query.shape[1])]
        key_ends = [keys * (b + 1) for b in range(query.shape[1])]
    start = key_start = 0
    for end, key_end in zip(ends, key_ends, strict=True):
        if end > start:
            hidden = _hidden(
                end - start, key_end - key_start, options.get("sparse_mode", 0),
                options.get("atten_mask"),
            )  # fmt: skip
            yield _Piece(slice(start, end), slice(key_start, key_end), hidden)
        start, key_start = end, key_end


def _probabilities(q: torch.Tensor, k: torch.Tensor, piece: _Piece, scale: float) -> torch.Tensor:
    """[heads, tokens, keys] of one piece; ``q`` and ``k`` are [tokens, heads, channels]."""
    scores = q.transpose(0, 1) @ k.permute(1, 2, 0) * scale
    if piece.hidden is not None:
        scores = scores.masked_fill(piece.hidden, float("-inf"))
    return scores.softmax(-1)


@_reference("npu_fusion_attention", "npu_fusion_attention_v2")
def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_num: int, input_layout: str,
    scale: float = 1.0, keep_prob: float = 1.0, **options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Output, softmax maximum, softmax sum, empty, seed, offset, size of the dropout mask."""
    assert keep_prob == 1.0, "the emulator has no dropout in attention"
    channels = query.shape[-1] if input_layout == "TND" else query.shape[-1] // head_num
    groups = key.shape[1] if input_layout == "TND" else key.shape[-1] // channels
    q = _split_heads(query, input_layout, head_num)
    k, v = (_split_heads(x, input_layout, groups) for x in (key, value))
    k, v = (x.repeat_interleave(head_num // groups, 1) for x in (k, v))
    out = torch.zeros(q.shape[0], head_num, v.shape[-1])
    for piece in _pieces(query, key, input_layout, options):
        weights = _probabilities(q[piece.queries], k[piece.keys], piece, scale)
        out[piece.queries] = (weights @ v[piece.keys].transpose(0, 1)).transpose(0, 1)
    if input_layout == "SBH":
        out = out.reshape(query.shape[1], query.shape[0], -1).transpose(0, 1)
    statistics = torch.zeros(q.shape[0], head_num, 8)
    empty = torch.zeros(0, dtype=query.dtype)
    return out.to(query.dtype).contiguous(), statistics, statistics.clone(), empty, 0, 0, 0


@_reference("npu_fusion_attention_grad", "npu_fusion_attention_grad_v2")
def attention_backward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dy: torch.Tensor, head_num: int,
    input_layout: str, *, scale_value: float = 1.0, **options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Gradients of queries, keys and values, and two empty ones."""
    channels = query.shape[-1] if input_layout == "TND" else query.shape[-1] // head_num
    groups = key.shape[1] if input_layout == "TND" else key.shape[-1] // channels
    share = head_num // groups
    q, grad = (_split_heads(x, input_layout, head_num) for x in (query, dy))
    k, v = (_split_heads(x, input_layout, groups) for x in (key, value))
    k, v = (x.repeat_interleave(share, 1) for x in (k, v))
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for piece in _pieces(query, key, input_layout, options):
        rows, columns = piece.queries, piece.keys
        weights = _probabilities(q[rows], k[columns], piece, scale_value)
        over = grad[rows].transpose(0, 1)
        dv[columns] = (weights.transpose(1, 2) @ over).transpose(0, 1)
        inner = over @ v[columns].permute(1, 2, 0)
        inner = weights * (inner - (weights * inner).sum(-1, keepdim=True)) * scale_value
        dq[rows] = (inner @ k[columns].transpose(0, 1)).transpose(0, 1)
        dk[columns] = (inner.transpose(1, 2) @ q[rows].transpose(0, 1)).transpose(0, 1)
    dk, dv = (x.unflatten(1, (groups, share)).sum(2) for x in (dk, dv))
    found = (
        (x.reshape(like.shape) if input_layout == "TND" else _join_heads(x, like, input_layout))
        for x, like in ((dq, query), (dk, key), (dv, value))
    )
    dq, dk, dv = (x.to(query.dtype) for x in found)
    return dq, dk, dv, torch.zeros(0), torch.zeros(0)


# --- norms and activations --------------------------------------------------------------------


@_reference("npu_rms_norm")
def rms_norm(
    input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm and the reciprocal root mean square, [..., 1] fp32."""
    inverse = torch.rsqrt(input.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return (input.float() * inverse * gamma.float()).to(input.dtype), inverse


@_reference("npu_rms_norm_backward")
def rms_norm_backward(
    dy: torch.Tensor, input: torch.Tensor, gamma: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the input and of gamma (fp32)."""
    unit, grad = input.float() * rstd, dy.float()
    inner = grad * gamma.float()
    dx = rstd * (inner - unit * (inner * unit).mean(-1, keepdim=True))
    return dx.to(input.dtype), (grad * unit).flatten(0, -2).sum(0)


@_reference("npu_swiglu")
def swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """silu of the first half times the second."""
    gate, up = input.float().chunk(2, dim)
    return (F.silu(gate) * up).to(input.dtype)


@_reference("npu_swiglu_backward")
def swiglu_backward(grad_output: torch.Tensor, input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Gradients of both halves."""
    gate, up = input.float().chunk(2, dim)
    grad, sigmoid = grad_output.float(), gate.sigmoid()
    silu = gate * sigmoid
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([grad * up * slope, grad * silu], dim).to(input.dtype)


# --- layouts and types --------------------------------------------------------------------------


@_reference("_npu_dtype_cast")
def cast(input: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Another element type."""
    return input.to(dtype, copy=True)


@_reference("_npu_dtype_cast_backward")
def cast_backward(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Back to the type of the input."""
    return grad.to(dtype, copy=True)


@_reference("npu_format_cast")
def to_format(input: torch.Tensor, **ignored: Any) -> torch.Tensor:
    """A copy: private memory formats are not emulated, all is ND."""
    return input.clone()
