"""Rollouts survive the way from the engines to the trainers: every field, every sample, once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.table_engine import single_rank

from mindspeed_rl.experience.exchange import (
    Sample,
    exchange_rollouts,
    pack_rollouts,
    unpack_rollouts,
)
from mindspeed_rl.types import Completion, Prompt, Rollout

PARTS = ("math", "format")
IDS = st.integers(0, 2**40)
SINGLE = st.floats(width=32, allow_nan=False)


@pytest.fixture(autouse=True, scope="module")
def world() -> Iterator[None]:
    with single_rank():
        yield


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    tokens = tuple(draw(st.lists(IDS, max_size=5)))
    logprobs = tuple(draw(SINGLE) for _ in tokens)
    completion = Completion(
        tokens, logprobs, draw(st.sampled_from(["stop", "length"])), draw(st.integers(-1, 2**40))
    )
    parts = draw(st.dictionaries(st.sampled_from(PARTS), SINGLE))
    prompt = Prompt(draw(IDS), (1, 2), "text", "answer")
    return Rollout(draw(IDS), prompt, completion, draw(st.none() | SINGLE), parts)


def assert_same(sample: Sample, rollout: Rollout) -> None:
    done = rollout.completion
    assert (sample.sample_id, sample.prompt_index) == (rollout.sample_id, rollout.prompt.index)
    assert tuple(sample.response.tolist()) == done.token_ids
    assert tuple(sample.logprobs.tolist()) == done.logprobs
    assert sample.response.dtype is torch.int64 and sample.logprobs.dtype is torch.float32
    assert sample.stopped == (done.finish_reason == "stop")
    assert sample.weights_version == done.weights_version
    expected = [rollout.reward, *(rollout.reward_parts.get(name) for name in PARTS)]
    found = [None if value != value else value for value in (sample.reward, *sample.parts)]
    assert found == expected


@given(st.lists(rollouts(), max_size=6))
@settings(deadline=None)
def test_unpacking_is_the_inverse_of_packing(batch: list[Rollout]) -> None:
    """Ids beyond fp32's integers, empty responses, rewards and parts that abstained."""
    samples = unpack_rollouts(*pack_rollouts(batch, PARTS), len(PARTS))
    for sample, rollout in zip(samples, batch, strict=True):
        assert_same(sample, rollout)


def rollout_of(sample_id: int) -> Rollout:
    completion = Completion((sample_id,), (-1.0,), "stop", 0)
    return Rollout(sample_id, Prompt(0, (1,), "", ""), completion, 1.0)


def test_samples_come_in_the_order_of_their_ids() -> None:
    samples = exchange_rollouts([rollout_of(i) for i in (2, 0, 1)], (), 3)
    assert [s.sample_id for s in samples] == [0, 1, 2]
    assert [int(s.response) for s in samples] == [0, 1, 2]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ((0, 2), r"2 arrived, 3 expected; missing \[1\]"),
        ((0, 1), r"2 arrived, 3 expected; missing \[2\]"),
        ((0, 1, 1), r"3 arrived, 3 expected; missing \[2\]"),
        ((0, 1, 2, 2), r"4 arrived, 3 expected; missing \[\]"),
        ((0, 1, 3), r"missing \[2\]"),
        ((), r"0 arrived, 3 expected; missing \[0, 1, 2\]"),
    ],
)
def test_a_sample_that_is_lost_or_doubled_stops_the_step(
    ids: tuple[int, ...], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        exchange_rollouts([rollout_of(i) for i in ids], (), 3)
