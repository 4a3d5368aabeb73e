"""Context parallelism of packed rows: what each rank holds."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl.core.types import TrainSample
from mindspeed_rl.packing.micro_batches import PackingRules
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
