"""Context parallelism of packed rows: shares, and attention over them, without process groups."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl.core.types import TrainSample
from mindspeed_rl.planning.micro_batches import PackingRules
from mindspeed_rl.samples.packing import MicroBatch, context_index, pack, split_context

SIZES = st.lists(st.integers(2, 9), min_size=1, max_size=4)


def make_row(sizes: list[int], cp: int, tail: int = 0) -> MicroBatch:
    samples = [
        TrainSample(
            i,
            torch.arange(n) + 100 * i,
            1,
            {
                "rollout_logprobs": torch.arange(n - 1.0) + 100 * i,
                "experts": torch.arange(2 * n - 2).view(-1, 2) + 100 * i,
            },
        )
        for i, n in enumerate(sizes)
    ]
    plan = PackingRules(
        dp=1, micro_batch_size=len(sizes), row_multiple=2 * cp, sequence_multiple=2 * cp
    ).assign(sizes)
    return pack(samples, plan.row_lengths[0][0] + 2 * cp * tail, 2 * cp)


@given(SIZES, st.sampled_from([2, 4]), st.integers(0, 2))
@settings(deadline=None)
def test_ranks_share_every_token_once(sizes: list[int], cp: int, tail: int) -> None:
    """Positions, tokens and what belongs to trained tokens; targets never cross a border."""
    row = make_row(sizes, cp, tail)
    shares = [split_context(row, cp, rank) for rank in range(cp)]
    assert {share.num_tokens for share in shares} == {row.num_tokens // cp}
    indices = [context_index(row.lengths, row.num_tokens, cp, rank) for rank in range(cp)]
    where = torch.cat(indices)
    assert sorted(where.tolist()) == list(range(row.num_tokens))
    for name in ("token_ids", "positions", "targets", "loss_mask"):
        joined = torch.cat([getattr(s, name) for s in shares])
        assert torch.equal(joined, getattr(row, name)[where])
    trained = torch.cat([i[s.loss_mask] for i, s in zip(indices, shares, strict=True)])
    order = trained.argsort()
    for name, values in row.columns.items():
        joined = torch.cat([s.columns[name] for s in shares])
        assert torch.equal(joined[order], values)
    assert torch.equal(torch.cat([s.sequence_of for s in shares])[order], row.sequence_of)


def test_ranks_have_equal_attention_work() -> None:
    """Zigzag: the first and the last chunk together; by halves the second rank had 3x the keys."""
    keys = []
    for rank in range(2):
        index = context_index([16], 16, 2, rank)
        keys.append(int((index + 1).sum()))
    assert keys[0] == keys[1]


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_attention_of_all_ranks_is_that_of_the_row(cp: int) -> None:
    """The masks and indices of ``make_packed_row`` against plain causal attention per sequence."""
    from mindspeed_rl.trainer.packed_attention import (
        ContextGroup,
        PackedSelfAttention,
        make_packed_row,
    )

    row = make_row([9, 5, 17, 2], cp, tail=1)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(row.num_tokens, 4, 8, generator=generator) for _ in range(3))
    expected, start = torch.zeros_like(q), 0
    for length in row.lengths:
        part = slice(start, start + length)
        args = [x[part].transpose(0, 1) for x in (q, k, v)]
        expected[part] = F.scaled_dot_product_attention(*args, is_causal=True).transpose(0, 1)
        start += length
    attention = PackedSelfAttention.__new__(PackedSelfAttention)
    torch.nn.Module.__init__(attention)
    attention.softmax_scale, attention.dropout = None, 0.0
    ranks = [split_context(row, cp, rank) for rank in range(cp)]
    everything = torch.arange(row.num_tokens)
    indices = [everything]
    if cp > 1:
        indices = [context_index(row.lengths, row.num_tokens, cp, rank) for rank in range(cp)]
    gathered = torch.cat(indices)
    for rank, (share, index) in enumerate(zip(ranks, indices, strict=True)):
        packed = make_packed_row(share.lengths, share.positions, ContextGroup(None, cp, rank))
        assert (packed.gathered is None) == (cp == 1) and packed.padded
        order = everything if packed.gathered is None else packed.gathered
        whole = [x[gathered][order] for x in (k, v)]
        assert torch.equal(whole[0], k), "the gathered keys are in the order of the row"
        outputs = attention._attend(q[index], *whole, packed)
        outputs.append(torch.zeros(1, 4, 8))
        found = torch.cat(outputs)[packed.order]
        assert torch.allclose(found, expected[index], atol=1e-6)
    padding = make_packed_row((), torch.zeros(4, dtype=torch.int64))
    assert padding.padded and attention._attend(q[:4], k[:4], v[:4], padding) == []
    assert padding.order.tolist() == [0] * 4


@pytest.mark.parametrize("rank", [0, 1])
def test_no_mask_outlives_the_attention_that_needs_it(rank: int) -> None:
    """Neither with the micro-batch nor for the backward pass; gradients are those of the row."""
    from mindspeed_rl.trainer.packed_attention import (
        ContextGroup,
        PackedSelfAttention,
        make_packed_row,
    )

    length, heads, channels = 512, 2, 4
    row = make_row([length], 2)
    share = split_context(row, 2, rank)
    packed = make_packed_row(share.lengths, share.positions, ContextGroup(None, 2, rank))
    tensors = [packed.queries, packed.keys, packed.order, packed.gathered]
    tensors += [group.last for group in packed.groups]
    assert sum(x.nbytes for x in tensors if x is not None) < 32 * length
    generator = torch.Generator().manual_seed(0)
    q, k, v, weight = torch.randn((4, length, heads, channels), generator=generator)
    index = context_index(row.lengths, length, 2, rank)
    attention = PackedSelfAttention.__new__(PackedSelfAttention)
    torch.nn.Module.__init__(attention)
    attention.softmax_scale, attention.dropout = None, 0.0
    kept: list[int] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.numel())
        return x

    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        outputs = attention._attend(inputs[0][index], inputs[1], inputs[2], packed)
    assert max(kept) <= length * heads * channels, "as much as the keys, and nothing squared"
    found = torch.cat(outputs).index_select(0, packed.order)
    (found * weight[index]).sum().backward()
    plain = [x.clone().requires_grad_() for x in (q, k, v)]
    whole = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in plain), is_causal=True)
    (whole.transpose(0, 1)[index] * weight[index]).sum().backward()
    for mine, theirs in zip(inputs, plain, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def test_a_prepared_micro_batch_takes_what_the_memory_model_counts() -> None:
    """25 bytes a token, and 12 a trained token besides its columns: int32 indices."""
    from mindspeed_rl.trainer.packed_attention import make_packed_row

    row = make_row([9, 5, 17, 2], 1)
    packed = make_packed_row(row.lengths, row.positions)
    of_tokens = (row.token_ids, row.positions, row.targets, row.loss_mask)
    borders = (packed.queries[: row.num_tokens], packed.keys[: row.num_tokens], packed.order)
    assert packed.positions is row.positions, "once, not twice"
    assert sum(x.nbytes for x in (*of_tokens, *borders)) == 25 * row.num_tokens
    of_trained = (row.trained, row.sequence_of, row.trained_index)
    assert sum(x.nbytes for x in of_trained) == 12 * sum(row.num_trained)
