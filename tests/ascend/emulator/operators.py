"""What the operators of torch_npu that are used here compute: references in plain torch, on CPU.

Sources: the operators' documentation in torch_npu (``_op_plugin_docs.py``). Accuracy is that of
fp32 arithmetic with one rounding at the end. ``REFERENCES`` is keyed by the operator's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

REFERENCES: dict[str, Callable[..., Any]] = {}


def _reference(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        REFERENCES.update({n if "::" in n else f"npu::{n}": function for n in names})
        return function

    return register


# --- attention --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a tensor of heads is stored: TND (packed), SBH or BNSD."""

    name: str
    heads: int

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens of all batches, heads, channels] fp32."""
        if self.name == "BNSD":
            return x.float().transpose(1, 2).flatten(0, 1)
        if self.name == "SBH":
            return x.float().transpose(0, 1).reshape(x.shape[0] * x.shape[1], self.heads, -1)
        assert self.name == "TND", f"the emulator has no attention in the layout {self.name}"
        return x.float()

    def pack(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The inverse, with the batches and the type of ``like``; channels may differ."""
        if self.name == "BNSD":
            x = x.unflatten(0, (like.shape[0], like.shape[2])).transpose(1, 2)
        elif self.name == "SBH":
            x = x.reshape(like.shape[1], like.shape[0], -1).transpose(0, 1)
        return x.to(like.dtype).contiguous()

    def lengths(self, x: torch.Tensor, ends: Any) -> list[int]:
        """Tokens of each sequence; empty ones are legal in TND, where ``ends`` are cumulative."""
        if self.name == "TND":
            return [int(b) - int(a) for a, b in zip([0, *ends], ends, strict=False)]
        batch, length = (0, 2) if self.name == "BNSD" else (1, 0)
        return [x.shape[length]] * x.shape[batch]


@dataclass(frozen=True, slots=True)
class _Attention:
    """One call: tensors as [tokens, heads, channels], keys and values repeated for their groups."""

    layout: _Layout
    groups: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    pieces: tuple[tuple[slice, slice, torch.Tensor | None], ...]
    scale: float

    def scores(self, rows: slice, columns: slice, hidden: Any) -> torch.Tensor:
        """[heads, queries, keys] of one sequence, -inf where hidden."""
        scores = self.q[rows].transpose(0, 1) @ self.k[columns].permute(1, 2, 0) * self.scale
        return scores if hidden is None else scores.masked_fill(hidden, float("-inf"))

    def stored(self, statistics: list[torch.Tensor], query: torch.Tensor) -> torch.Tensor:
        """Statistics [heads, queries] of each sequence as the operator stores them, eightfold.

        One sequence after the other; in TND the shape says otherwise ("NTD" in the documentation
        of ``softmax_layout``, and ``flatten_softmax`` of MindSpeed's ring attention).
        """
        heads = self.q.shape[1]
        flat = torch.cat([torch.zeros(0), *(s.flatten() for s in statistics)])
        shape: tuple[int, ...] = (self.q.shape[0], heads)
        if self.layout.name != "TND":
            batch = query.shape[1 if self.layout.name == "SBH" else 0]
            shape = (batch, heads, self.q.shape[0] // batch)
        return flat.view(*shape, 1).repeat(*(1 for _ in shape), 8)

    def read(self, stored: torch.Tensor) -> list[torch.Tensor]:
        """The inverse of :meth:`stored`: [heads, queries, 1] of each sequence."""
        flat, heads = stored.reshape(-1, 8), self.q.shape[1]
        assert torch.equal(flat, flat[:, :1].expand(-1, 8)), "eight equal copies"
        sizes = [(rows.stop - rows.start) * heads for rows, *_ in self.pieces]
        return [part.view(heads, -1, 1) for part in flat[:, 0].split(sizes)]


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: int, layout: str,
    scale: float, options: Mapping[str, Any],
) -> _Attention:  # fmt: skip
    assert options.get("keep_prob", 1.0) == 1.0, "the emulator has no dropout in attention"
    groups = key.shape[1]
    if layout == "SBH":
        groups = key.shape[-1] // (query.shape[-1] // heads)
    stored, shared = _Layout(layout, heads), _Layout(layout, groups)
    k, v = (shared.unpack(x).repeat_interleave(heads // groups, 1) for x in (key, value))
    pieces, row, column = [], 0, 0
    lengths = stored.lengths(query, options.get("actual_seq_qlen"))
    key_lengths = shared.lengths(key, options.get("actual_seq_kvlen"))
    for i, (length, num_keys) in enumerate(zip(lengths, key_lengths, strict=True)):
        if length:
            hidden = _hidden(length, num_keys, i, options)
            pieces.append((slice(row, row + length), slice(column, column + num_keys), hidden))
        row, column = row + length, column + num_keys
    return _Attention(stored, groups, stored.unpack(query), k, v, tuple(pieces), scale)


def _hidden(length: int, keys: int, batch: int, options: Mapping[str, Any]) -> torch.Tensor | None:
    """Which keys a query does not see: True hides."""
    mode, mask = options.get("sparse_mode", 0), options.get("atten_mask")
    if mode == 2:  # causal from the upper left corner
        return torch.ones(length, keys, dtype=torch.bool).triu(1)
    if mode == 3:  # causal from the lower right corner
        return torch.ones(length, keys, dtype=torch.bool).triu(1 + keys - length)
    assert mode in (0, 1), f"the emulator has no attention with sparse_mode {mode}"
    if mask is None:
        return None
    whole = mask.reshape(-1, *mask.shape[-2:])
    return whole[batch if whole.shape[0] > 1 else 0, :length, :keys].bool()


@_reference("npu_fusion_attention")
def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_num: int, input_layout: str,
    scale: float = 1.0, **options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Output, softmax maximum, softmax sum, empty, seed, offset, size of the dropout mask."""
    call = _attention(query, key, value, head_num, input_layout, scale, options)
    out = torch.zeros(call.q.shape[0], head_num, call.v.shape[-1])
    largest, sums = [], []
    for rows, columns, hidden in call.pieces:
        scores = call.scores(rows, columns, hidden)
        largest.append(scores.amax(-1))
        weights = (scores - largest[-1][..., None]).exp()
        sums.append(weights.sum(-1))
        weights = weights / sums[-1][..., None]
        out[rows] = (weights @ call.v[columns].transpose(0, 1)).transpose(0, 1)
    statistics = (call.stored(found, query) for found in (largest, sums))
    empty = torch.zeros(0, dtype=query.dtype)
    return (call.layout.pack(out, query), *statistics, empty, 0, 0, 0)


@_reference("npu_fusion_attention_v3")
def attention_v3(**arguments: Any) -> tuple[Any, ...]:
    """What scaled_dot_product_attention calls: seed and offset are tensors."""
    out, largest, sums, empty, *_ = attention(**arguments)
    return out, largest, sums, empty, torch.zeros(1), torch.zeros(1)


@_reference("npu_fusion_attention_grad", "npu_fusion_attention_grad_v3")
def attention_backward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dy: torch.Tensor, head_num: int,
    input_layout: str, scale_value: float = 1.0, **options: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Gradients of queries, keys and values, and two empty ones; weights by the statistics."""
    call = _attention(query, key, value, head_num, input_layout, scale_value, options)
    grad = call.layout.unpack(dy)
    means = (grad * call.layout.unpack(options["attention_in"])).sum(-1, keepdim=True)
    statistics = zip(*(call.read(options[n]) for n in ("softmax_max", "softmax_sum")), strict=True)
    dq, dk, dv = (torch.zeros_like(x) for x in (call.q, call.k, call.v))
    for (rows, columns, hidden), (largest, sums) in zip(call.pieces, statistics, strict=True):
        weights = (call.scores(rows, columns, hidden) - largest).exp() / sums
        over = grad[rows].transpose(0, 1)
        dv[columns] = (weights.transpose(1, 2) @ over).transpose(0, 1)
        inner = over @ call.v[columns].permute(1, 2, 0)
        inner = weights * (inner - means[rows].transpose(0, 1)) * scale_value
        dq[rows] = (inner @ call.k[columns].transpose(0, 1)).transpose(0, 1)
        dk[columns] = (inner.transpose(1, 2) @ call.q[rows].transpose(0, 1)).transpose(0, 1)
    dk, dv = (x.unflatten(1, (call.groups, head_num // call.groups)).sum(2) for x in (dk, dv))
    packed = ((dq, query), (dk, key), (dv, value))
    return (*(call.layout.pack(x, like) for x, like in packed), torch.zeros(0), torch.zeros(0))


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


@_reference("aten::matmul_backward")
def matmul_backward(
    grad: torch.Tensor, self: torch.Tensor, other: torch.Tensor, mask: Any
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of both factors; the CPU takes matmul apart and has no such operator."""
    left = self.unsqueeze(0) if self.dim() == 1 else self
    right = other.unsqueeze(1) if other.dim() == 1 else other
    if self.dim() == 1:
        grad = grad.unsqueeze(-1 if other.dim() == 1 else -2)
    if other.dim() == 1:
        grad = grad.unsqueeze(-1)
    to_left = (grad @ right.transpose(-1, -2)).sum_to_size(left.shape).reshape(self.shape)
    to_right = (left.transpose(-1, -2) @ grad).sum_to_size(right.shape).reshape(other.shape)
    return (to_left if mask[0] else None, to_right if mask[1] else None)


# --- experts ------------------------------------------------------------------------------------


@_reference("npu_gather_backward")
def gather_backward(
    grad: torch.Tensor, self_size: Any, dim: int, index: torch.Tensor, **ignored: Any
) -> torch.Tensor:
    """Gradients added where the values came from."""
    return grad.new_zeros(tuple(self_size)).scatter_add_(dim, index, grad)


@_reference("npu_grouped_matmul")
def grouped_matmul(
    x: list[torch.Tensor], weight: list[torch.Tensor], *, group_list: Any = None,
    group_type: int = -1, group_list_type: int = 0, **options: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """Groups of rows of ``x`` times a weight each (0), or of the contracted dimension (2)."""
    assert len(x) == 1 and not any(options.get(name) for name in ("bias", "scale", "offset"))
    listed = [int(n) for n in group_list]
    sizes = [b - a for a, b in zip([0, *listed], listed, strict=False)]
    if group_list_type == 1:
        sizes = listed
    if group_type == 0:
        matrices = list(weight[0]) if len(weight) == 1 and weight[0].dim() == 3 else weight
        *parts, rest = x[0].split([*sizes, len(x[0]) - sum(sizes)])  # of no group here
        products = [p @ w for p, w in zip(parts, matrices, strict=True)]
        return [torch.cat([*products, x[0].new_zeros(len(rest), matrices[0].shape[-1])])]
    assert group_type == 2, f"the emulator has no grouped_matmul with group_type {group_type}"
    pairs = zip(x[0].split(sizes, dim=1), weight[0].split(sizes), strict=True)
    return [torch.stack([left @ right for left, right in pairs])]


def _in_token_order(routing_map: torch.Tensor) -> torch.Tensor:
    """[pairs] int64: where each chosen (token, expert), by token, is in the order by expert."""
    by_expert = routing_map.bool().t()
    number = torch.zeros(by_expert.shape, dtype=torch.int64)
    number[by_expert] = torch.arange(int(by_expert.sum()))
    return number.t()[by_expert.t()]


@_reference("npu_moe_token_permute_with_routing_map")
def permute_tokens(
    tokens: torch.Tensor, routing_map: torch.Tensor, *, probs: torch.Tensor | None = None,
    num_out_tokens: int | None = None, drop_and_pad: bool = False,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Tokens and weights sorted by expert, and where each copy of a token went."""
    assert not drop_and_pad and num_out_tokens == int(routing_map.sum())
    by_expert = routing_map.bool().t()
    token = torch.arange(len(tokens)).expand(by_expert.shape)[by_expert]
    weights = tokens.new_zeros(0) if probs is None else probs.t()[by_expert]
    return tokens[token], weights, _in_token_order(routing_map).int()


@_reference("npu_moe_token_permute_with_routing_map_grad")
def permute_tokens_backward(
    permuted_token_out_grad: torch.Tensor, probs_grad: torch.Tensor | None,
    sorted_indices: torch.Tensor, routing_map: torch.Tensor, experts_num: int, tokens_num: int,
    drop_and_pad: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of tokens (copies added) and of weights (0 where a token was not sent)."""
    places = sorted_indices.long()
    copies = permuted_token_out_grad[places].float().unflatten(0, (tokens_num, -1))
    grad = copies.sum(1).to(permuted_token_out_grad.dtype)
    if probs_grad is None:
        return grad, grad.new_zeros(0)
    weights = probs_grad.new_zeros(tokens_num, experts_num)
    weights[routing_map.bool()] = probs_grad[places]
    return grad, weights


@_reference("_npu_moe_token_unpermute_with_routing_map")
def unpermute_tokens(
    permuted_tokens: torch.Tensor, sorted_indices: torch.Tensor, restore_shape: list[int], *,
    probs: torch.Tensor | None = None, routing_map: torch.Tensor | None = None,
    drop_and_pad: bool = False,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The copies of each token added, back in their order."""
    assert probs is None and not drop_and_pad, "the emulator adds copies without weights"
    copies = permuted_tokens[sorted_indices.long()].float().unflatten(0, (restore_shape[0], -1))
    out = copies.sum(1).to(permuted_tokens.dtype)
    return out, sorted_indices.clone(), sorted_indices.clone(), out.new_zeros(0)


@_reference("npu_moe_token_unpermute_with_routing_map_grad")
def unpermute_tokens_backward(
    unpermuted_tokens_grad: torch.Tensor, out_index: torch.Tensor, *rest: Any, **more: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every copy of a token gets its gradient."""
    num_copies = len(out_index) // len(unpermuted_tokens_grad)
    grad = torch.empty(len(out_index), unpermuted_tokens_grad.shape[1]).to(unpermuted_tokens_grad)
    grad[out_index.long()] = unpermuted_tokens_grad.repeat_interleave(num_copies, 0)
    return grad, grad.new_zeros(0)


# --- what MindSpeed compiles itself, with compilers that are not here ----------------------------


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: int = 0) -> torch.Tensor:
    """Rotary embedding; mode 0 pairs the halves of the channels, 1 neighbours."""
    assert mode == 0, "the emulator pairs halves"
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def update_adamw(
    param: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor,
    max_exp_avg_sq: torch.Tensor, step: torch.Tensor, lr: float, beta1: float, beta2: float,
    weight_decay: float, eps: float, amsgrad: bool, maximize: bool,
) -> None:  # fmt: skip
    """One AdamW update of one parameter, in place; ``step`` (int64) counts this update, too."""
    assert not amsgrad and not maximize, "the emulator has plain AdamW"
    assert step.dtype == torch.int64 and step.numel() == 1 and step.device == param.device
    count = int(step)
    param.mul_(1 - lr * weight_decay)
    exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
    exp_avg_sq.mul_(beta2).add_(grad.square(), alpha=1 - beta2)
    mean, square = exp_avg / (1 - beta1**count), exp_avg_sq / (1 - beta2**count)
    param.sub_(lr * mean / (square.sqrt() + eps))
