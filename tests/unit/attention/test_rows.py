"""Borders of packed rows, and attention over them in dense padded batches, in one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.attention_oracle import attention_of_row
from support.ring_blocks import ring_attention_of_blocks

from mindspeed_rl.attention.context import ContextGroup, context_group
from mindspeed_rl.attention.kernels import KERNELS, planner
from mindspeed_rl.attention.padded_sdpa import PaddedPlan
from mindspeed_rl.attention.ring import merged
from mindspeed_rl.attention.rows import PackedRow, attend, make_packed_row
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.types import TrainSample
from mindspeed_rl.samples.packing import MicroBatch, context_index, pack, split_context


def make_row(sizes: list[int], cp: int, tail: int = 0) -> MicroBatch:
    samples = [
        TrainSample(i, torch.arange(n), 1, {"rollout_logprobs": torch.arange(n - 1.0)})
        for i, n in enumerate(sizes)
    ]
    total = sum(-(-n // (2 * cp)) * 2 * cp for n in sizes)
    return pack(samples, total + 2 * cp * tail, 2 * cp)


def padded(row: PackedRow) -> PaddedPlan:
    (plan,) = row.blocks
    assert isinstance(plan, PaddedPlan)
    return plan


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_attention_of_all_ranks_is_that_of_the_row(cp: int) -> None:
    """The pieces and masks of gathered keys against plain causal attention per sequence."""
    row = make_row([9, 5, 17, 2], cp, tail=1)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(row.num_tokens, 4, 8, generator=generator) for _ in range(3))
    expected = attention_of_row(q, k, v, row.lengths, 8**-0.5).float()
    shares = [split_context(row, cp, rank) for rank in range(cp)]
    indices = [torch.arange(row.num_tokens)]
    if cp > 1:
        indices = [context_index(row.lengths, row.num_tokens, cp, rank) for rank in range(cp)]
    gathered = torch.cat(indices)
    for rank, (share, index) in enumerate(zip(shares, indices, strict=True)):
        context = ContextGroup(cp, rank)
        packed = make_packed_row(share.lengths, share.positions, context)
        found = padded(packed).attend(q[index], k[gathered], v[gathered], None)
        assert torch.allclose(found, expected[index], atol=1e-6)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_blocks_of_a_ring_add_up_to_the_row(ranks: int) -> None:
    """Keys of earlier and later ranks, merged by their log-sum-exp; gradients of all."""
    lengths = [2 * ranks * size for size in (5, 1, 9, 2)]
    total = sum(lengths) + 2 * ranks
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(total, n, 8, generator=generator) for n in (4, 2, 2, 4))
    plain = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = attention_of_row(*plain, lengths, 0.3)
    (expected * grad).sum().backward()
    out, found = ring_attention_of_blocks(
        "padded_sdpa", ranks, lengths, (q, k, v), grad, 0.3, torch.device("cpu")
    )
    torch.testing.assert_close(out, expected.detach().float(), rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(mine, theirs.grad, rtol=1e-5, atol=1e-5)


def test_parts_are_merged_by_the_sums_of_their_exponentials() -> None:
    """Against fp64; large scores, a part without keys, and padding, which has none in either."""
    inf = torch.inf
    lse = torch.tensor([[0.7, 300.0, -200.0, -inf, 0.25, -inf]])
    more_lse = torch.tensor([[-0.3, 298.5, -200.5, 1.5, -inf, -inf]])
    out, more = torch.randn(2, 1, 6, 4, generator=torch.Generator().manual_seed(0))
    out[0, [3, 5]] = more[0, 4:] = 0.0
    exact, other = (x.double().exp()[..., None] for x in (lse, more_lse))
    sums = exact + other
    wanted = (out.double() * exact + more.double() * other) / sums
    wanted[0, 5] = 0.0
    found, total = merged(out, lse, more, more_lse)
    assert found is out
    torch.testing.assert_close(found, wanted.float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(total, sums.log().squeeze(-1).float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("kind", "ulysses"), [("a2a", 4), ("a2a+p2p", 2)])
def test_exchanged_tokens_are_put_in_the_order_of_their_row(kind: str, ulysses: int) -> None:
    """The chunks of the ranks of a block are the row, or the chunks of a rank of a smaller ring."""
    lengths, total = [8, 24, 16], 56
    sent = [context_index(lengths, total, 4, rank) for rank in range(4)]
    for rank in range(4):
        context = context_group(kind, 4, rank, ulysses)
        row = make_packed_row(lengths, torch.zeros(total // 4), context)
        assert row.arrival is not None and row.departure is not None
        received = torch.cat([sent[peer] for peer in context.block])
        found = received[row.arrival]
        expected = torch.arange(total)
        if kind == "a2a+p2p":
            expected = context_index(lengths, total, 2, rank // 2)
        assert torch.equal(found, expected)
        assert torch.equal(found[row.departure], received)


def test_a_row_of_padding_alone_attends_to_nothing() -> None:
    row = make_packed_row((), torch.zeros(4, dtype=torch.int64))
    q, k, v = torch.ones(3, 4, 2, 8)
    assert torch.equal(attend(q, k, v, row), torch.zeros(4, 2, 8))
    assert padded(row).order.tolist() == [0] * 4


@pytest.mark.parametrize("rank", [0, 1])
def test_no_mask_outlives_the_attention_that_needs_it(rank: int) -> None:
    """Neither with the micro-batch nor for the backward pass; gradients are those of the row."""
    length, heads, channels = 512, 2, 4
    row = make_row([length], 2)
    share = split_context(row, 2, rank)
    packed = make_packed_row(share.lengths, share.positions, ContextGroup(2, rank))
    plan = padded(packed)
    tensors = [plan.queries, plan.keys, plan.order, *(group.last for group in plan.groups)]
    assert sum(x.nbytes for x in tensors if x is not None) < 32 * length
    generator = torch.Generator().manual_seed(0)
    q, k, v, weight = torch.randn((4, length, heads, channels), generator=generator)
    indices = [context_index(row.lengths, length, 2, one) for one in range(2)]
    index, gathered = indices[rank], torch.cat(indices)
    kept: list[int] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.numel())
        return x

    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        mine = inputs[0][index], inputs[1][gathered], inputs[2][gathered]
        found = plan.attend(*mine, None)
    assert max(kept) <= length * heads * channels, "as much as the keys, and nothing squared"
    (found * weight[index]).sum().backward()
    plain = [x.clone().requires_grad_() for x in (q, k, v)]
    whole = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in plain), is_causal=True)
    (whole.transpose(0, 1)[index] * weight[index]).sum().backward()
    for mine_grad, theirs in zip(inputs, plain, strict=True):
        torch.testing.assert_close(mine_grad.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def test_a_prepared_micro_batch_takes_what_the_memory_model_counts() -> None:
    """25 bytes a token, and 12 a trained token besides its columns: int32 indices."""
    row = make_row([9, 5, 17, 2], 1)
    packed = make_packed_row(row.lengths, row.positions)
    plan = padded(packed)
    of_tokens = (row.token_ids, row.positions, row.targets, row.loss_mask)
    borders = (plan.queries[: row.num_tokens], plan.keys[: row.num_tokens], plan.order)
    assert packed.positions is row.positions, "once, not twice"
    assert sum(x.nbytes for x in (*of_tokens, *borders)) == 25 * row.num_tokens
    of_trained = (row.trained, row.sequence_of, row.trained_index)
    assert sum(x.nbytes for x in of_trained) == 12 * sum(row.num_trained)


def test_a_group_whose_size_the_blocks_do_not_divide_has_smaller_ones() -> None:
    """Rows may be shared by fewer ranks than the run's context parallelism has."""
    whole = context_group("a2a+p2p", 8, 5, 4)
    assert (whole.ulysses, whole.ring_size, whole.ring_rank) == (4, 2, 1)
    assert list(whole.block) == [4, 5, 6, 7] and (whole.next, whole.previous) == (1, 1)
    part = context_group("a2a+p2p", 2, 1, 4)
    assert (part.ulysses, part.ring_size) == (2, 1)
    odd = context_group("a2a+p2p", 6, 3, 4)
    assert (odd.ulysses, odd.ring_size, odd.next, odd.previous) == (2, 3, 5, 1)
    alone = context_group("a2a", 1, 0)
    assert not alone.gathers and alone.ring_size == alone.ulysses == 1


def test_models_that_a_fused_kernel_cannot_compute_have_the_general_one() -> None:
    general = KERNELS["padded_sdpa"]
    assert planner("varlen", torch.bfloat16) is KERNELS["varlen"]
    assert planner("varlen", torch.float32) is general
    assert planner("tnd", torch.float32) is KERNELS["tnd"]
    for name in ("varlen", "tnd"):
        assert planner(name, torch.bfloat16, dropout=0.1) is general
    with pytest.raises(UsageError, match="--platform"):
        planner("kernel of nobody", torch.bfloat16)
