"""The references of the engine's operators say what plain PyTorch says.

They are called as vLLM-Ascend calls them, on emulated NPUs, so their schemas are the real ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.ascend_emul
BLOCK = 4


@pytest.fixture(autouse=True, scope="module")
def emulated() -> None:
    from ascend.emulator import extension
    from ascend.emulator.device import emulate
    from torch_npu.op_plugin.atb._atb_ops import _register_atb_extensions

    emulate()
    extension.declare()
    _register_atb_extensions()
    torch.npu.set_device(0)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """As the engine runs: some operators are others where gradients are wanted."""
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def npu(*tensors: torch.Tensor) -> Any:
    moved = tuple(tensor.to("npu") for tensor in tensors)
    return moved if len(moved) > 1 else moved[0]


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-5)


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Neighbouring channels as complex numbers, turned by angles [tokens, channels / 2]."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    turn = torch.polar(torch.ones_like(angles), angles)
    while turn.dim() < pairs.dim():
        turn = turn.unsqueeze(1)
    return torch.view_as_real(pairs * turn).flatten(-2)


def halves(x: torch.Tensor) -> torch.Tensor:
    """Neighbours apart: the even channels, then the odd ones."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], -1)


def neighbours(x: torch.Tensor) -> torch.Tensor:
    """The inverse."""
    return torch.stack(x.chunk(2, -1), -1).flatten(-2)


def test_the_norm_of_a_sum() -> None:
    x, y, weight, bias = (torch.randn(*size) for size in ((3, 8), (3, 8), (8,), (8,)))
    for beta in (None, bias):
        operator = torch.ops._C_ascend.npu_add_rms_norm_bias
        moved = npu(x, y, weight)
        out, inverse, total = operator(*moved, None if beta is None else npu(beta), 1e-6)
        expected = F.rms_norm(x + y, (8,), weight, 1e-6)
        assert_close(out, expected if beta is None else expected + beta)
        assert_close(total, x + y)
        assert_close(inverse, (x + y).pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt())


@pytest.mark.parametrize("neox", [True, False])
def test_rotary_embedding_in_place(neox: bool) -> None:
    """Both orders of channels; the table has cosines, then sines."""
    positions, heads, width = torch.tensor([4, 0, 7]), 2, 6
    angles = torch.arange(9.0)[:, None] * torch.rand(width // 2)
    table = torch.cat([angles.cos(), angles.sin()], -1)
    q, k = torch.randn(3, heads * width), torch.randn(3, width)
    moved_q, moved_k = npu(q.clone(), k.clone())
    torch.ops.atb._npu_rotary_embedding(npu(positions), moved_q, moved_k, width, npu(table), neox)
    for found, x in ((moved_q, q), (moved_k, k)):
        by_head = x.unflatten(-1, (-1, width))
        expected = turned(neighbours(by_head) if neox else by_head, angles[positions])
        assert_close(found, (halves(expected) if neox else expected).flatten(1))


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """[queries, heads, channels]; the last query sees all keys."""
    mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


MASK = torch.ones(2048, 2048, dtype=torch.int8).triu(1)


def test_attention_over_the_paged_cache() -> None:
    """Keys are written by slots, -1 writes nothing; a part of each prompt is asked for."""
    lengths, asked, heads, groups, width = [6, 3], [2, 3], 4, 2, 8
    k, v = torch.randn(2, sum(lengths), groups, width)
    blocks = torch.tensor([[5, 2], [0, 0]], dtype=torch.int32)
    slots = [int(blocks[i, t // BLOCK]) * BLOCK + t % BLOCK
             for i, n in enumerate(lengths) for t in range(n)]  # fmt: skip
    key_cache, value_cache = npu(*torch.full((2, 6, BLOCK, groups, width), 9.0))
    extra = torch.full((1, groups, width), 5.0)
    torch.ops.atb._npu_reshape_and_cache(
        *npu(torch.cat([k, extra]), torch.cat([v, extra])), key_cache, value_cache,
        npu(torch.tensor([*slots, -1], dtype=torch.int32)),
    )  # fmt: skip
    assert int((key_cache.cpu() == 9.0).sum()) == (6 * BLOCK - sum(lengths)) * groups * width
    q = torch.randn(sum(asked), heads, width)
    out, _ = torch.ops.npu.npu_fused_infer_attention_score(
        npu(q), key_cache.view(6, BLOCK, -1), value_cache.view(6, BLOCK, -1), num_heads=heads,
        num_key_value_heads=groups, scale=0.3, input_layout="TND", actual_seq_lengths=[2, 5],
        actual_seq_lengths_kv=lengths, sparse_mode=3, atten_mask=npu(MASK),
        block_table=npu(blocks), block_size=BLOCK,
    )  # fmt: skip
    expected = [sdpa(q[:2], k[:6], v[:6], 0.3), sdpa(q[2:], k[6:], v[6:], 0.3)]
    assert_close(out, torch.cat(expected))


@pytest.mark.parametrize("rotated", [0, 4])
def test_attention_of_packed_prompts(rotated: int) -> None:
    """With rotated channels by themselves, and values of another width, as latent attention."""
    ends, heads = [3, 4, 9], 2
    q, k = torch.randn(2, 9, heads, 8 + rotated)
    v = torch.randn(9, heads, 6 if rotated else 8)
    parts = {}
    if rotated:
        parts = {"query_rope": npu(q[..., 8:].contiguous()),
                 "key_rope": npu(k[..., 8:].contiguous())}  # fmt: skip
    out, sums = torch.ops.npu.npu_fused_infer_attention_score(
        *npu(q[..., :8].contiguous(), k[..., :8].contiguous(), v), num_heads=heads,
        num_key_value_heads=heads, scale=0.5, input_layout="TND", actual_seq_lengths=ends,
        actual_seq_lengths_kv=ends, sparse_mode=3, atten_mask=npu(MASK), softmax_lse_flag=True,
        **parts,
    )  # fmt: skip
    pieces = [slice(a, b) for a, b in pairwise([0, *ends])]
    assert_close(out, torch.cat([sdpa(q[p], k[p], v[p], 0.5) for p in pieces]))
    one = torch.einsum("hc,hc->h", q[3], k[3]) * 0.5
    assert_close(sums[3, :, 0], one)


def test_one_query_over_a_latent_cache() -> None:
    """Every head reads the same keys, and the values are their latent channels."""
    lengths, heads, latent, rotary = [5, 2], 4, 8, 4
    cache, rope = torch.randn(7, 1, BLOCK, latent), torch.randn(7, 1, BLOCK, rotary)
    q, q_rope = torch.randn(2, heads, 1, latent), torch.randn(2, heads, 1, rotary)
    blocks = torch.tensor([[6, 1], [3, 0]], dtype=torch.int32)
    moved = npu(cache)
    out, _ = torch.ops.npu.npu_fused_infer_attention_score_v2(
        npu(q), moved, moved, query_rope=npu(q_rope), key_rope=npu(rope), num_query_heads=heads,
        num_key_value_heads=1, softmax_scale=0.2, input_layout="BNSD_NBSD", sparse_mode=0,
        block_table=npu(blocks), block_size=BLOCK, actual_seq_kvlen=lengths,
    )  # fmt: skip
    assert out.shape == (heads, 2, 1, latent)
    for i, length in enumerate(lengths):
        v, rotated = (x[blocks[i].long(), 0].flatten(0, 1)[:length] for x in (cache, rope))
        k = torch.cat([v, rotated], -1)
        whole = torch.cat([q[i], q_rope[i]], -1).transpose(0, 1)
        assert_close(out[:, i], sdpa(whole, k[:, None], v[:, None], 0.2).transpose(0, 1))


def test_a_batch_of_products_with_its_result_permuted() -> None:
    x, weight = torch.randn(3, 5, 4), torch.randn(3, 4, 2)
    found = torch.ops.npu.npu_transpose_batchmatmul(*npu(x, weight), perm_y=[1, 0, 2])
    assert_close(found, torch.einsum("nbl,nlv->bnv", x, weight))


def test_latent_keys_are_normed_rotated_and_written() -> None:
    tokens, latent, rotary = 3, 8, 6
    angles = torch.rand(tokens, rotary // 2)
    cos, sin = (torch.cat([f(angles)] * 2, -1)[:, None, None] for f in (torch.cos, torch.sin))
    kv, weight = torch.randn(tokens, 1, 1, latent + rotary), torch.randn(latent)
    k_cache, latent_cache = npu(torch.zeros(2, BLOCK, 1, rotary), torch.zeros(2, BLOCK, 1, latent))
    slots = torch.tensor([6, -1, 1])
    operator = torch.ops.npu.npu_kv_rmsnorm_rope_cache
    _, _, keys, normed = operator(
        *npu(kv, weight, cos, sin, slots), k_cache, latent_cache, epsilon=1e-6, cache_mode="PA",
        is_output_kv=True,
    )  # fmt: skip
    expected = (
        (keys, k_cache, halves(turned(kv[..., latent:], angles))),
        (normed, latent_cache, F.rms_norm(kv[..., :latent], (latent,), weight, 1e-6)),
    )
    for found, cache, wanted in expected:
        assert_close(found, wanted)
        stored = torch.zeros(2 * BLOCK, wanted.shape[-1])
        stored[6], stored[1] = wanted[0, 0, 0], wanted[2, 0, 0]
        assert_close(cache, stored.view(2, BLOCK, 1, -1))


@pytest.mark.parametrize("sigmoid", [True, False])
@pytest.mark.parametrize("groups", [1, 4])
def test_experts_are_chosen(groups: int, sigmoid: bool) -> None:
    """Token by token: groups by their best two, experts by biased scores, weights without bias."""
    experts, chosen, kept = 12, 3, 2 if groups > 1 else 1
    x, bias = torch.randn(5, experts), torch.randn(experts)
    weights, ids, _ = torch.ops._C_ascend.moe_gating_top_k(
        npu(x), k=chosen, k_group=kept, group_count=groups, group_select_mode=1, renorm=1,
        norm_type=int(sigmoid), out_flag=False, routed_scaling_factor=2.5, eps=1e-20,
        bias_opt=npu(bias),
    )  # fmt: skip
    for token in range(5):
        scores = torch.sigmoid(x[token]) if sigmoid else x[token].softmax(0)
        ranked = (scores + bias).tolist()
        members = [
            list(range(g, g + experts // groups)) for g in range(0, experts, experts // groups)
        ]
        members.sort(key=lambda group: -sum(sorted(ranked[e] for e in group)[-2:]))
        allowed = [e for group in members[:kept] for e in group]
        best = sorted(allowed, key=lambda e: -ranked[e])[:chosen]
        assert ids[token].tolist() == best
        assert_close(weights[token], scores[best] / scores[best].sum() * 2.5)


@pytest.mark.parametrize("held", [(0, 4), (1, 3)])
def test_tokens_go_to_experts_and_come_back(held: tuple[int, int]) -> None:
    """Sorted, multiplied in groups, weighted and added; experts of other ranks give nothing."""
    experts, tokens, chosen = 4, 5, 2
    x, matrices = torch.randn(tokens, 6), torch.randn(experts, 6, 3)
    ids = torch.rand(tokens, experts).argsort(-1)[:, :chosen].int()
    weights = torch.rand(tokens, chosen) * ((ids >= held[0]) & (ids < held[1]))
    rows, places, counts, _ = torch.ops._C_ascend.npu_moe_init_routing_custom(
        *npu(x, ids), active_num=tokens * chosen, expert_num=experts, expert_tokens_num_type=1,
        expert_tokens_num_flag=True, active_expert_range=list(held), quant_mode=-1,
    )  # fmt: skip
    (out,) = torch.ops.npu.npu_grouped_matmul(
        [rows], [npu(matrices[slice(*held)])], group_list=counts, group_list_type=1, group_type=0,
        split_item=2,
    )  # fmt: skip
    found = torch.ops.npu.npu_moe_token_unpermute(out, places.abs(), probs=npu(weights))
    every = torch.einsum("th,ehf->tef", x, matrices)
    expected = (every.gather(1, ids.long()[..., None].expand(-1, -1, 3)) * weights[..., None]).sum(
        1
    )
    assert_close(found, expected)


def test_gradients_are_added_in_fp32() -> None:
    x, weight, total = torch.randn(4, 3).half(), torch.randn(4, 2).half(), torch.randn(3, 2)
    moved = npu(total.clone())
    torch.ops.atb._npu_matmul_add_fp32(*npu(x, weight), moved)
    assert_close(moved, total + x.float().t() @ weight.float())


def test_every_token_has_its_slot() -> None:
    from ascend.emulator.engine_operators import SlotMapping

    blocks = torch.tensor([[7, 2, 0], [4, 0, 0]], dtype=torch.int32)
    positions = torch.tensor([3, 4, 5, 0, 1])
    slots = npu(torch.full((8,), 99, dtype=torch.int32))
    starts = torch.tensor([0, 3, 5], dtype=torch.int32)
    SlotMapping()[(3,)](
        5, 8, *npu(starts, positions, blocks), 3, BLOCK, slots, TOTAL_CP_WORLD_SIZE=1,
        TOTAL_CP_RANK=0, CP_KV_CACHE_INTERLEAVE_SIZE=1, PAD_ID=-1, BLOCK_SIZE=1024,
    )  # fmt: skip
    assert slots.tolist() == [31, 8, 9, 16, 17, -1, -1, -1]


def test_a_generator_of_a_device_draws_by_seed_and_offset() -> None:
    """As rewinding one needs; every draw moves the offset on."""
    generator = torch.Generator(device="npu").manual_seed(3)
    first, second = (torch.empty(6, device="npu").exponential_(generator=generator) for _ in "ab")
    assert not torch.equal(first.cpu(), second.cpu())
    moved = generator.get_offset() // 2
    generator.set_offset(moved)
    again = torch.empty(6, device="npu").exponential_(generator=generator)
    assert torch.equal(again.cpu(), second.cpu())
    other = torch.Generator(device="npu").manual_seed(4)
    assert not torch.equal(
        torch.empty(6, device="npu").exponential_(generator=other).cpu(), first.cpu()
    )
