"""Rows on some of the context-parallel ranks: what each rank packs."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl.core.layout import nested_sizes
from mindspeed_rl.core.types import TrainSample
from mindspeed_rl.packing.cost import SequenceCost
from mindspeed_rl.packing.micro_batches import MicroBatchPlan, PackingRules
from mindspeed_rl.samples.packing import MicroBatch, split_context
from mindspeed_rl.samples.placement import BatchRules, bytes_moved, minimize_moves

LENGTHS = st.lists(st.integers(2, 40), min_size=1, max_size=24)


def rules_of(dp: int, cp: int, tp: int = 1) -> PackingRules:
    return PackingRules(
        dp=dp,
        micro_batch_size=1,
        max_tokens=10 * cp,
        row_multiple=2 * cp * tp,
        sequence_multiple=2 * cp,
        cost=SequenceCost(exchanged=2.0),
        context_sizes=nested_sizes(cp),
    )


def make_samples(lengths: list[int]) -> list[TrainSample]:
    return [TrainSample(i, torch.arange(n) + 100 * i, 1) for i, n in enumerate(lengths)]


def packed(
    rules: PackingRules, plan: MicroBatchPlan, lengths: list[int]
) -> dict[tuple[int, int], list[MicroBatch]]:
    """What each (dp, cp) rank packs, out of its own samples alone."""
    samples, found = make_samples(lengths), {}
    for dp in range(rules.dp):
        for cp in range(rules.context_sizes[-1]):
            own = BatchRules(rules, dp, cp)
            found[dp, cp] = own.pack(plan, {i: samples[i] for i in own.mine(plan)})
    return found


@given(LENGTHS, st.sampled_from([1, 2]), st.sampled_from([4, 6, 8]), st.sampled_from([1, 2]))
@settings(deadline=None)
def test_ranks_of_a_row_have_it_and_every_token_is_on_one_of_them(
    lengths: list[int], dp: int, cp: int, tp: int
) -> None:
    lengths = [min(n, 10 * cp) for n in lengths]
    rules = rules_of(dp, cp, tp)
    plan = rules.assign(lengths)
    batches = packed(rules, plan, lengths)
    assert {len(own) for own in batches.values()} == {plan.num_micro_batches}
    seen: Counter[int] = Counter()
    for (d, c), own in batches.items():
        for number, batch in enumerate(own):
            size = batch.shared_by or cp
            peers = range(c - c % size, c - c % size + size)
            for peer in peers:
                other = batches[d, peer][number]
                assert other.shared_by == batch.shared_by
                assert other.sample_ids == batch.sample_ids and other.lengths == batch.lengths
            share = split_context(batch, size, c % size)
            assert share.num_tokens * size == batch.num_tokens
            assert share.num_tokens % tp == 0
            seen.update(share.targets[share.loss_mask].tolist())
    expected = [100 * i + place for i, n in enumerate(lengths) for place in range(1, n)]
    assert seen == Counter(expected)


def test_short_rows_are_on_one_rank_without_padding() -> None:
    rules = rules_of(1, 4)
    lengths = [7, 39, 3, 9, 10, 5]
    plan = rules.assign(lengths)
    assert plan.samples_by_ranks() == {1: 5, 4: 1}
    batches = packed(rules, plan, lengths)
    alone = [b for own in batches.values() for b in own if b.shared_by == 1 and b.sample_ids]
    assert all(b.num_tokens == sum(b.num_real) for b in alone)
    assert sorted(i for b in alone for i in b.sample_ids) == [0, 2, 3, 4, 5]


@given(LENGTHS, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_samples_of_equal_length_alone_change_places(lengths: list[int], random: object) -> None:
    """Fewer bytes move, and every row keeps its lengths and its ranks."""
    rules = rules_of(3, 4)
    plan = rules.assign(lengths)
    draw = random.randrange  # type: ignore[attr-defined]
    moved = np.array([[draw(5) for _ in range(3)] for _ in lengths], dtype=np.int64)
    near = minimize_moves(plan, rules.exchangeable(lengths), moved)
    assert bytes_moved(near.assignment, moved) <= bytes_moved(plan.assignment, moved)

    def shapes(of: MicroBatchPlan) -> list[object]:
        places = of.places or [[None] * len(rows) for rows in of.assignment]
        return sorted(
            (
                [
                    (sorted(lengths[i] for i in row), length, str(place))
                    for row, length, place in zip(rows, tokens, at, strict=True)
                ]
                for rows, tokens, at in zip(of.assignment, of.row_lengths, places, strict=True)
            ),
            key=str,
        )

    if plan.places is not None:
        assert shapes(near) == shapes(plan)
    assert sorted(i for rows in near.assignment for row in rows for i in row) == list(
        range(len(lengths))
    )
