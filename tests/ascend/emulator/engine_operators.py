"""What the operators compute that vLLM-Ascend calls to generate: references in plain torch.

Sources: the documentation of the operators in torch_npu (``_op_plugin_docs.py``); of ATB's, which
has none there, the calls and tests of op-plugin; of vLLM-Ascend's own, the kernels under ``csrc``
of its sources. Arithmetic is fp32, with one rounding at the end. Importing this registers them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from ascend.emulator.operators import _reference

# --- norms ---------------------------------------------------------------------------------------


@_reference("npu_add_rms_norm", "_C_ascend::npu_add_rms_norm_bias")
def add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None = None,
    epsilon: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The norm of the sum, its reciprocal root mean square in fp32, and the sum."""
    total = x1 + x2
    inverse = torch.rsqrt(total.float().pow(2).mean(-1, keepdim=True) + epsilon)
    normed = total.float() * inverse * gamma.float()
    if beta is not None:
        normed = normed + beta.float()
    return normed.to(x1.dtype), inverse, total


# --- rotary embedding ----------------------------------------------------------------------------


@_reference("atb::_npu_rotary_embedding")
def rotary_embedding(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, head_size: int,
    cos_sin_cache: torch.Tensor, is_neox_style: bool,
) -> None:  # fmt: skip
    """Rotates all channels of queries and keys, [tokens, heads x channels], in place."""
    cos, sin = cos_sin_cache[positions.flatten()].float().unsqueeze(1).chunk(2, -1)
    for x in (query, key):
        heads = x.float().unflatten(-1, (-1, head_size))
        if is_neox_style:
            first, second = heads.chunk(2, -1)
        else:
            first, second = heads[..., 0::2], heads[..., 1::2]
        rotated = (first * cos - second * sin, second * cos + first * sin)
        whole = torch.cat(rotated, -1) if is_neox_style else torch.stack(rotated, -1).flatten(-2)
        x.copy_(whole.reshape(x.shape))


# --- the key/value cache -------------------------------------------------------------------------


@_reference("atb::_npu_reshape_and_cache")
def reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
    slot_indices: torch.Tensor,
) -> None:  # fmt: skip
    """Writes each token's key and value, [tokens, heads, channels], to its slot; -1 is no slot."""
    here = slot_indices >= 0
    slots = slot_indices[here].long()
    for cache, new in ((key_cache, key), (value_cache, value)):
        cache.view(-1, *cache.shape[2:])[slots] = new[here].view(-1, *cache.shape[2:])


def paged(cache: torch.Tensor, blocks: torch.Tensor, length: int, heads: int) -> torch.Tensor:
    """[length, heads, channels] fp32 of a sequence, from its blocks of the cache."""
    block_size = cache.shape[1]
    used = blocks[: -(-length // block_size)].long()
    return cache[used].flatten(0, 1)[:length].reshape(length, heads, -1).float()


# --- attention -----------------------------------------------------------------------------------


def _lengths(ends: Sequence[int]) -> list[int]:
    return [int(b) - int(a) for a, b in zip([0, *ends], ends, strict=False)]


def _one_sequence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """[queries, heads, channels] and the logarithm of the softmax sums, [queries, heads, 1]."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = torch.einsum("qhc,khc->hqk", q, k) * scale
    if causal:  # from the lower right corner
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + len(k) - len(q))
        scores = scores.masked_fill(hidden, float("-inf"))
    out = torch.einsum("hqk,khc->qhc", scores.softmax(-1), v)
    return out, scores.logsumexp(-1).t().unsqueeze(-1)


@_reference("npu_fused_infer_attention_score")
def fused_infer_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, num_heads: int,
    num_key_value_heads: int = 0, scale: float = 1.0, input_layout: str = "BSH",
    actual_seq_lengths: Any = None, actual_seq_lengths_kv: Any = None, sparse_mode: int = 0,
    block_table: torch.Tensor | None = None, atten_mask: torch.Tensor | None = None,
    block_size: int = 0, softmax_lse_flag: bool = False, query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None, **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of packed sequences (TND), with keys in the paged cache or packed as well.

    Lengths of queries are cumulative, and of keys too unless they are paged. Rotated channels of
    latent attention may come by themselves.
    """
    assert input_layout == "TND" and sparse_mode in (0, 3), (input_layout, sparse_mode)
    unknown = {name for name, given in options.items() if isinstance(given, torch.Tensor)}
    assert not unknown, f"the emulator's attention does not know {sorted(unknown)}"
    assert (atten_mask is None) == (sparse_mode == 0), "mode 3 has its mask, mode 0 has none"
    heads = num_key_value_heads or num_heads
    if query_rope is not None and key_rope is not None:
        query, key = torch.cat([query, query_rope], -1), torch.cat([key, key_rope], -1)
    width = query.shape[-1] if block_table is not None else value.shape[-1]
    out = query.new_zeros(len(query), num_heads, width)
    sums = torch.full((len(query), num_heads, 1), float("inf"))
    row = column = 0
    keys = list(actual_seq_lengths_kv)
    if block_table is None:
        keys = _lengths(keys)
    for i, (length, num_keys) in enumerate(zip(_lengths(actual_seq_lengths), keys, strict=False)):
        if length and block_table is not None:
            assert key.shape[1] == block_size
            k, v = (paged(x, block_table[i], int(num_keys), heads) for x in (key, value))
        else:
            k, v = (x[column : column + num_keys].float() for x in (key, value))
        if length:
            rows = slice(row, row + length)
            found = _one_sequence(query[rows].float(), k, v, scale, sparse_mode == 3)
            out[rows], sums[rows] = found[0].to(out.dtype), found[1]
        row, column = row + length, column + int(num_keys)
    return out, sums if softmax_lse_flag else sums.new_zeros(1)


@_reference("npu_fused_infer_attention_score_v2")
def fused_infer_attention_v2(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, query_rope: torch.Tensor,
    key_rope: torch.Tensor, num_query_heads: int, num_key_value_heads: int, softmax_scale: float,
    input_layout: str, actual_seq_kvlen: Sequence[int], block_table: torch.Tensor,
    block_size: int, sparse_mode: int = 0, atten_mask: torch.Tensor | None = None, **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """One query of each sequence over a paged latent cache; heads come first in the output.

    Queries are [sequences, heads, 1, channels], the cache is [blocks, 1, block size, channels].
    """
    assert input_layout == "BNSD_NBSD" and sparse_mode == 0 and atten_mask is None
    assert query.shape[1] == num_query_heads and num_key_value_heads == key.shape[1] == 1
    unknown = {name for name, given in options.items() if isinstance(given, torch.Tensor)}
    assert not unknown and key.shape[2] == block_size, unknown
    out = query.new_zeros(num_query_heads, len(query), 1, value.shape[-1])
    for i, length in enumerate(actual_seq_kvlen[: len(query)]):
        stored = (paged(x.transpose(1, 2), block_table[i], int(length), 1)
                  for x in (key, key_rope, value))  # fmt: skip
        latent, rotated, v = stored
        q = torch.cat([query[i], query_rope[i]], -1).float().transpose(0, 1)
        found, _ = _one_sequence(q, torch.cat([latent, rotated], -1), v, softmax_scale, False)
        out[:, i] = found.transpose(0, 1).to(out.dtype)
    return out, torch.zeros(1)


@_reference("npu_transpose_batchmatmul")
def transpose_batchmatmul(
    input: torch.Tensor, weight: torch.Tensor, *, perm_x1: Any = None, perm_x2: Any = None,
    perm_y: Any = None, **options: Any,
) -> torch.Tensor:  # fmt: skip
    """A batch of products, with both factors and the result permuted."""
    unused = (0, 1, 2)
    left, right = input.permute(perm_x1 or unused), weight.permute(perm_x2 or unused)
    return (left @ right).permute(perm_y or unused).contiguous()


# --- latent attention's rotation and cache -------------------------------------------------------


@_reference("npu_interleave_rope")
def interleave_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates neighbouring channels, [batch, heads, 1, channels]; the even ones come first then."""
    first, second = x.float()[..., 0::2], x.float()[..., 1::2]
    apart, turned = torch.cat([first, second], -1), torch.cat([-second, first], -1)
    return (apart * cos.float() + turned * sin.float()).to(x.dtype)


@_reference("npu_kv_rmsnorm_rope_cache")
def kv_rmsnorm_rope_cache(
    kv: torch.Tensor, gamma: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    index: torch.Tensor, k_cache: torch.Tensor, ckv_cache: torch.Tensor, *,
    epsilon: float = 1e-5, cache_mode: str = "Norm", is_output_kv: bool = False, **options: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Norms the latent channels, rotates the others, and writes both to their slots (-1: none).

    Returns both caches, and with ``is_output_kv`` what was written.
    """
    assert cache_mode == "PA" and kv.shape[1] == kv.shape[2] == 1
    latent, rotary = kv.split([len(gamma), kv.shape[-1] - len(gamma)], -1)
    inverse = torch.rsqrt(latent.float().pow(2).mean(-1, keepdim=True) + epsilon)
    latent = (latent.float() * inverse * gamma.float()).to(kv.dtype)
    rotated = interleave_rope(rotary, cos, sin)
    here = index >= 0
    for cache, new in ((k_cache, rotated), (ckv_cache, latent)):
        cache.view(-1, cache.shape[-1])[index[here]] = new.view(-1, new.shape[-1])[here]
    if not is_output_kv:
        return k_cache, ckv_cache, kv.new_zeros(0), kv.new_zeros(0)
    return k_cache, ckv_cache, rotated, latent


# --- experts -------------------------------------------------------------------------------------

# What a kernel leaves in rows that no expert of this rank has.
_UNWRITTEN = 7.0


@_reference("_C_ascend::moe_gating_top_k")
def moe_gating_top_k(
    x: torch.Tensor, k: int, k_group: int, group_count: int, group_select_mode: int, renorm: int,
    norm_type: int, out_flag: bool, routed_scaling_factor: float, eps: float,
    bias_opt: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Weights and numbers of the chosen experts of each token, [tokens, k], and all scores.

    The bias and the groups decide which experts are chosen; the weights are the scores without it,
    sigmoids (always renormalised) or a softmax. A group counts by its best two (mode 1).
    """
    scores = x.float().softmax(-1) if norm_type == 0 else x.float().sigmoid()
    ranked = scores if bias_opt is None else scores + bias_opt.float()
    if group_count > 1:
        grouped = ranked.unflatten(-1, (group_count, -1))
        best = grouped.topk(2, -1).values.sum(-1) if group_select_mode == 1 else grouped.amax(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(
            1, best.topk(k_group).indices, True
        )
        ranked = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
    chosen = ranked.topk(k, -1).indices
    weights = scores.gather(-1, chosen)
    if norm_type == 1 or renorm == 1:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return (weights * routed_scaling_factor).to(x.dtype), chosen.int(), scores


@_reference("_C_ascend::npu_moe_init_routing_custom", "npu_moe_init_routing_v2")
def moe_init_routing(
    x: torch.Tensor, expert_idx: torch.Tensor, *, active_expert_range: Sequence[int],
    expert_num: int = -1, quant_mode: int = -1, row_idx_type: int = 0,
    expert_tokens_num_type: int = 0, scale: torch.Tensor | None = None, **options: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Tokens sorted by their experts of a range, where each choice went, tokens per expert.

    A choice of an expert outside the range has -1; rows behind the last are not written.
    """
    assert quant_mode == -1 and row_idx_type == 0 and expert_tokens_num_type == 1 and scale is None
    first, last = active_expert_range
    flat = expert_idx.flatten().long()
    here = (flat >= first) & (flat < last)
    order = torch.where(here, flat, last).argsort(stable=True)[: int(here.sum())]
    places = torch.full_like(flat, -1)
    places[order] = torch.arange(len(order))
    rows = x.new_full((len(flat), x.shape[1]), _UNWRITTEN)
    rows[: len(order)] = x[order // expert_idx.shape[1]]
    counts = torch.bincount(flat[here] - first, minlength=last - first)
    return rows, places.int(), counts, torch.zeros(len(flat))


@_reference("npu_moe_token_unpermute")
def moe_token_unpermute(
    permuted_tokens: torch.Tensor, sorted_indices: torch.Tensor, probs: torch.Tensor | None = None,
    padded_mode: bool = False, restore_shape: Any = None,
) -> torch.Tensor:  # fmt: skip
    """The copies of each token, weighted and added, in the order of the tokens."""
    assert not padded_mode
    copies = permuted_tokens[sorted_indices.long()].float()
    if probs is None:
        return copies.to(permuted_tokens.dtype)
    copies = copies.unflatten(0, probs.shape) * probs.float().unsqueeze(-1)
    return copies.sum(1).to(permuted_tokens.dtype)


# --- kernels written in Triton --------------------------------------------------------------------


class SlotMapping:
    """vLLM's Triton kernel ``_compute_slot_mapping_kernel``: the cache slot of every token."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(
            num_tokens: int, max_num_tokens: int, query_start_loc: torch.Tensor,
            positions: torch.Tensor, block_table: torch.Tensor, block_table_stride: int,
            block_size: int, slot_mapping: torch.Tensor, *, TOTAL_CP_WORLD_SIZE: int,
            TOTAL_CP_RANK: int, CP_KV_CACHE_INTERLEAVE_SIZE: int, PAD_ID: int, BLOCK_SIZE: int,
        ) -> None:  # fmt: skip
            from ascend.emulator.device import as_cpu

            assert TOTAL_CP_WORLD_SIZE == 1, "the emulator has no context parallelism"
            # One kernel of a device: what computes it here is in no census.
            query_start_loc, positions, block_table, slot_mapping = map(
                as_cpu, (query_start_loc, positions, block_table, slot_mapping)
            )
            slot_mapping[num_tokens:max_num_tokens].fill_(PAD_ID)
            starts = query_start_loc.tolist()
            for request in range(grid[0] - 1):
                tokens = slice(starts[request], starts[request + 1])
                at = positions[tokens]
                blocks = block_table[request][(at // block_size).long()].long()
                slots = blocks * block_size + at % block_size
                slot_mapping[tokens] = slots.to(slot_mapping.dtype)

        return launch


# --- gradients of linear layers, which vLLM-Ascend calls once to warm ATB up ---------------------


@_reference("atb::_npu_matmul_add_fp32")
def matmul_add_fp32(x: torch.Tensor, weight: torch.Tensor, C: torch.Tensor) -> None:
    """Adds the product of the transposed ``x`` with ``weight`` to ``C`` in place, in fp32."""
    C.add_(x.float().t() @ weight.float())
