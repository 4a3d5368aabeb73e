"""Plans and packed rows: every token once, targets of the own sequence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl.core.types import TrainSample
from mindspeed_rl.packing.micro_batches import PackingRules, real_share
from mindspeed_rl.samples.packing import (
    context_index,
    pack,
    padding_mask,
    sequence_of_tokens,
    split_context,
)

lengths_lists = st.lists(st.integers(2, 30), max_size=20)


def sample(sample_id: int, length: int, num_prompt: int, supervised: bool = False) -> TrainSample:
    """Token ids, log-probs and advantage all tell where they come from."""
    first = 100 * sample_id
    return TrainSample(
        sample_id=sample_id,
        token_ids=torch.arange(first, first + length) + 1,
        num_prompt_tokens=num_prompt,
        columns={}
        if supervised
        else {
            "rollout_logprobs": -torch.arange(num_prompt, length) - first * 1.0,
            "advantages": torch.full((length - num_prompt,), 0.5 + sample_id),
        },
    )


@given(
    lengths_lists, st.integers(1, 4), st.integers(1, 5), st.sampled_from([0, 30, 47]),
    st.integers(1, 8),
)  # fmt: skip
@settings(deadline=None)
def test_every_sample_is_planned_once(
    lengths: list[int], dp: int, size: int, max_tokens: int, multiple: int
) -> None:
    plan = PackingRules(
        dp=dp, micro_batch_size=size, max_tokens=max_tokens, row_multiple=multiple
    ).assign(lengths)
    placed = [i for rank in plan.assignment for batch in rank for i in batch]
    assert sorted(placed) == list(range(len(lengths)))
    assert len(plan.assignment) == dp
    # the same number of rows everywhere, or pipelines and collectives hang
    assert {len(batches) for batches in plan.assignment} == {plan.num_micro_batches}
    batches = [batch for rank in plan.assignment for batch in rank]
    rows = [row for rank in plan.row_lengths for row in rank]
    used = [sum(lengths[i] for i in batch) for batch in batches]
    assert real_share([plan], lengths) == sum(used) / sum(rows)
    for batch, tokens, row in zip(batches, used, rows, strict=True):
        assert row % multiple == 0
        assert max(1, tokens) <= row < max(1, tokens) + multiple, "a row has its own length"
        assert list(batch) == sorted(batch)
        assert tokens <= max_tokens if max_tokens else len(batch) <= size


def test_packing_by_tokens_fills_rows() -> None:
    plan = PackingRules(dp=1, micro_batch_size=1, max_tokens=10, row_multiple=4).assign(
        [4, 4, 4, 9, 1]
    )
    assert plan.assignment == (((0, 1, 4), (2,), (3,)),)
    assert plan.row_lengths == ((12, 4, 12),)
    even = PackingRules(dp=2, micro_batch_size=1, max_tokens=20, row_multiple=1).assign(
        [4, 4, 4, 9, 1]
    )
    assert sorted(sum(len(row) for row in rank) for rank in even.assignment) == [2, 3]
    assert max(map(max, even.row_lengths)) == 12, "as short as one row for each rank, not 20"


def test_unset_tokens_are_those_of_the_longest_sequences() -> None:
    """--micro-batch-size counts the longest sequences of the step where no limit is known."""
    rules = PackingRules(dp=1, micro_batch_size=2, max_tokens=None)
    assert rules.assign([10, 2, 3, 5, 10, 10]).row_lengths == ((20, 20),)


def test_a_pipeline_has_a_micro_batch_for_each_stage() -> None:
    """One full row would leave all stages but one idle; with fewer samples there are fewer rows."""
    rules = PackingRules(dp=2, micro_batch_size=1, max_tokens=100, fewest=4)
    plan = rules.assign([5] * 16)
    assert plan.row_lengths == ((10, 10, 10, 10), (10, 10, 10, 10))
    assert rules.assign([5, 5, 5, 5]).num_micro_batches == 2


def test_rows_have_one_length_where_it_is_asked_for() -> None:
    own = PackingRules(dp=2, micro_batch_size=1, max_tokens=10, row_multiple=4)
    assert own.assign([9, 3, 3, 10, 1, 2]).row_lengths == ((12, 4), (8, 12))
    equal = replace(own, equal_lengths=True)
    assert equal.assign([9, 3, 3, 10, 1, 2]).row_lengths == ((12, 12), (12, 12))


def test_a_sample_that_fits_no_row_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--max-tokens-per-micro-batch 10 .*11 tokens"):
        PackingRules(dp=1, micro_batch_size=1, max_tokens=10, row_multiple=1).assign([3, 11])


def test_no_samples_make_one_empty_micro_batch() -> None:
    plan = PackingRules(dp=2, micro_batch_size=4, row_multiple=8).assign([])
    assert plan.assignment == (((),), ((),))
    row = pack([], plan.row_lengths[0][0])
    assert row.num_tokens == 8
    assert not row.loss_mask.any()
    assert row.column("rollout_logprobs").shape == row.sequence_of.shape == (0,)


@st.composite
def sample_lists(draw: st.DrawFn) -> list[TrainSample]:
    """Up to five samples with at least one prompt token; a response may be empty."""
    samples, supervised = [], draw(st.booleans())
    for i in range(draw(st.integers(1, 5))):
        length = draw(st.integers(1, 12))
        samples.append(sample(i, length, draw(st.integers(1, length)), supervised))
    return samples


@given(sample_lists(), st.integers(0, 5))
@settings(deadline=None)
def test_a_packed_row_by_definition(samples: list[TrainSample], padding: int) -> None:
    """Token by token against the samples: the definition of each field, without any shifting."""
    total = sum(s.length for s in samples)
    row = pack(samples, total + padding)
    tokens, positions, targets, mask = (
        [0] * (total + padding) for _ in range(4)
    )  # fmt: skip
    owners: list[int] = []
    columns: dict[str, list[float]] = {name: [] for name in samples[0].columns}
    t = 0
    for owner, s in enumerate(samples):
        for i in range(s.length):
            tokens[t], positions[t] = int(s.token_ids[i]), i
            if i + 1 < s.length:
                targets[t] = int(s.token_ids[i + 1])
                if i + 1 >= s.num_prompt_tokens:
                    mask[t] = 1
                    owners.append(owner)
                    for name, values in s.columns.items():
                        columns[name].append(float(values[i + 1 - s.num_prompt_tokens]))
            t += 1
    assert row.token_ids.tolist() == tokens
    assert row.positions.tolist() == positions
    assert row.targets.tolist() == targets
    assert row.loss_mask.tolist() == [bool(m) for m in mask]
    assert row.trained.tolist() == [place for place, m in enumerate(mask) if m]
    assert {name: values.tolist() for name, values in row.columns.items()} == columns
    assert row.sequence_of.tolist() == owners
    assert row.lengths == tuple(s.length for s in samples)
    assert row.sample_ids == tuple(s.sample_id for s in samples)


def test_a_row_that_is_too_short_is_refused() -> None:
    with pytest.raises(RuntimeError, match="9 tokens"):
        pack([sample(0, 5, 2), sample(1, 4, 2)], 8)


@pytest.mark.parametrize("multiple", [1, 4])
def test_the_token_behind_a_row_is_trained_on_and_not_read(multiple: int) -> None:
    """Rows of pretraining lie beside samples that end."""
    row = TrainSample(0, torch.tensor([5, 6, 7]), 1, token_after=8)
    ended = TrainSample(1, torch.tensor([15, 16]), 1)
    batch = pack([row, ended, row], 12, multiple)
    starts = [0, 3, 5] if multiple == 1 else [0, 4, 8]
    expected = {s + i: (5 + i, 6 + i) for s in (starts[0], starts[2]) for i in range(3)}
    expected |= {starts[1]: (15, 16)}
    found = {
        int(i): (int(batch.token_ids[i]), int(batch.targets[i])) for i in batch.loss_mask.nonzero()
    }
    assert found == expected
    assert batch.sequence_of.tolist() == [0, 0, 0, 1, 2, 2, 2]
    assert batch.columns == {}
    assert [row.num_trained, ended.num_trained] == [3, 1]


def test_a_column_has_a_row_for_every_trained_token() -> None:
    whole, short = sample(0, 5, 2), sample(1, 5, 2)
    cut = replace(short, columns={name: v[:-1] for name, v in short.columns.items()})
    for other in (cut, sample(1, 5, 2, supervised=True)):
        with pytest.raises(RuntimeError, match="sample 1: column 'rollout_logprobs'"):
            pack([whole, other], 12)


def test_a_column_of_training_is_declared() -> None:
    row = pack([sample(0, 5, 2)], 6)
    values = torch.tensor([0.5, 1.5, 2.5])
    assert torch.equal(row.with_column("old_logprobs", values).column("old_logprobs"), values)
    assert row.with_column("old_logprobs", None) is row
    with pytest.raises(RuntimeError, match="old_logprobs"):
        row.column("old_logprobs")
    with pytest.raises(KeyError):
        row.with_column("made_up", values)
    for wrong in (values.double(), values[:2]):
        with pytest.raises(AssertionError, match="old_logprobs"):
            row.with_column("old_logprobs", wrong)


@given(sample_lists(), st.integers(0, 5), st.sampled_from([1, 2]))
@settings(deadline=None)
def test_padding_is_what_no_sample_has(samples: list[TrainSample], tail: int, cp: int) -> None:
    multiple = 2 * cp if cp > 1 else 1
    total = sum(-(-s.length // multiple) * multiple for s in samples)
    row = pack(samples, total + tail * multiple, multiple)
    expected = [True] * row.num_tokens
    start = 0
    for s, length in zip(samples, row.lengths, strict=True):
        expected[start : start + s.length] = [False] * s.length
        start += length
    where = [list(range(row.num_tokens))]
    if cp > 1:
        where = [
            context_index(row.lengths, row.num_tokens, cp, rank).tolist() for rank in range(cp)
        ]
    for rank, index in enumerate(where):
        found = padding_mask(row, cp, rank)
        mine = [expected[i] for i in index]
        assert (found.tolist() if found is not None else [False] * len(mine)) == mine


@given(sample_lists(), st.integers(0, 5), st.sampled_from([1, 2]))
@settings(deadline=None)
def test_every_token_knows_its_sequence(samples: list[TrainSample], tail: int, cp: int) -> None:
    """The ids of a sample tell whose they are, and at which place."""
    multiple = 2 * cp if cp > 1 else 1
    total = sum(-(-s.length // multiple) * multiple for s in samples)
    row = pack(samples, total + tail * multiple, multiple)
    found = []
    for rank in range(cp):
        part = split_context(row, cp, rank)
        owners = sequence_of_tokens(part, cp, rank)
        assert owners.shape == part.positions.shape
        for owner, place, token in zip(
            owners.tolist(), part.positions.tolist(), part.token_ids.tolist(), strict=True
        ):
            if owner >= 0:
                assert token == samples[owner].token_ids[place]
                found.append((owner, place))
    assert sorted(found) == [(i, n) for i, s in enumerate(samples) for n in range(s.length)]
