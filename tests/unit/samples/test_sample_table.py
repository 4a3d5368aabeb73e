"""What every rank comes to know of a sample is what its engine said of it: every field, once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.table_engine import single_rank

from mindspeed_rl.core.types import Completion, Prompt, Rollout
from mindspeed_rl.samples.columns import experts_column, response_columns
from mindspeed_rl.samples.device_cache import TensorCache
from mindspeed_rl.samples.exchange import Redistribution
from mindspeed_rl.samples.rollout_info import Correctness, RolloutInfo, SampleKey, exchange_table
from mindspeed_rl.samples.store import keep_rollouts, responses_in

COLUMNS = response_columns(has_environment=True, experts=None)
PARTS = ("math", "format")
FIRST = SampleKey(3, 10)
IDS = st.integers(0, 2**31 - 1)
BIG = st.integers(0, 2**40)
SINGLE = st.floats(width=32, allow_nan=False)


@pytest.fixture(autouse=True, scope="module")
def world() -> Iterator[None]:
    with single_rank():
        yield


@st.composite
def rollouts(draw: st.DrawFn) -> list[Rollout]:
    found = []
    for i in range(draw(st.integers(0, 5))):
        tokens = tuple(draw(st.lists(IDS, max_size=5)))
        logprobs = tuple(draw(SINGLE) for _ in tokens)
        mask = tuple(draw(st.booleans()) for _ in tokens) if draw(st.booleans()) else None
        reason, version = draw(st.sampled_from(["stop", "length"])), draw(st.integers(-1, 2**40))
        parts = draw(st.dictionaries(st.sampled_from(PARTS), SINGLE))
        prompt = Prompt(draw(BIG), (1, 2), "text", "answer")
        completion = Completion(tokens, logprobs, reason, version, mask)
        found.append(Rollout(i, prompt, completion, draw(st.none() | SINGLE), parts))
    return draw(st.permutations(found))


def assert_same(sample: RolloutInfo, rollout: Rollout, group: int) -> None:
    done = rollout.completion
    assert (sample.sample_id, sample.prompt_index) == (rollout.sample_id, rollout.prompt.index)
    assert (sample.num_tokens, sample.num_sampled) == (len(done.token_ids), len(done.sampled_ids))
    assert sample.stopped == (done.finish_reason == "stop")
    assert (sample.weights_version, sample.group) == (done.weights_version, group)
    assert sample.key == SampleKey(3, 10 + rollout.sample_id)
    expected = [rollout.reward, *(rollout.reward_parts.get(name) for name in PARTS)]
    found = [None if value != value else value for value in (sample.reward, *sample.parts)]
    assert found == expected
    assert sample.correctness == (float(rollout.sample_id), 0.5)


@given(rollouts(), st.integers(0, 2**20))
@settings(deadline=None)
def test_tables_and_tensors_say_what_the_engine_said(batch: list[Rollout], group: int) -> None:
    """Ids beyond fp32's integers, empty responses, rewards and parts that abstained, masks."""
    correctness = {r.sample_id: Correctness(float(r.sample_id), 0.5) for r in batch}
    samples = exchange_table(batch, group, PARTS, len(batch), FIRST, correctness, columns=COLUMNS)
    cache = TensorCache(torch.device("cpu"))
    cache.begin_step(3)
    keep_rollouts(cache, COLUMNS, batch, samples)
    kept = Redistribution(cache, samples, COLUMNS, ())
    order = [rollout.sample_id for rollout in batch]
    responses = responses_in(kept, order, [samples[i] for i in order], COLUMNS)
    for rollout, response in zip(batch, responses, strict=True):
        sample, done = samples[rollout.sample_id], rollout.completion
        assert_same(sample, rollout, group)
        assert tuple(response["token_ids"].tolist()) == done.token_ids
        assert tuple(response["rollout_logprobs"].tolist()) == done.logprobs
        assert response["token_ids"].dtype is torch.int64
        assert response["loss_mask"].dtype is torch.bool
        mask = done.loss_mask or (True,) * len(done.token_ids)
        assert tuple(response["loss_mask"].tolist()) == mask


def rollout_of(sample_id: int) -> Rollout:
    completion = Completion((sample_id,), (-1.0,), "stop", 0)
    return Rollout(sample_id, Prompt(sample_id, (1,), "", ""), completion, 1.0)


def table_of(*ids: int) -> list[RolloutInfo]:
    return exchange_table([rollout_of(i) for i in ids], 0, (), 3, FIRST, columns=COLUMNS)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ((0, 2), r"2 arrived, 3 expected; missing \[1\]"),
        ((0, 1), r"2 arrived, 3 expected; missing \[2\]"),
        ((0, 1, 1), r"3 arrived, 3 expected; missing \[2\]"),
        ((0, 1, 2, 2), r"4 arrived, 3 expected; missing \[\]"),
        ((0, 1, 3), r"3 arrived, 3 expected; missing \[2\]"),
        ((0, 1, 2, -1), r"4 arrived, 3 expected; missing \[\]"),
        ((), r"0 arrived, 3 expected; missing \[0, 1, 2\]"),
    ],
)
def test_a_sample_that_is_lost_or_doubled_stops_the_step(
    ids: tuple[int, ...], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        table_of(*ids)


@pytest.mark.parametrize("changed", ["token", "logprob", "mask", "experts", "missing"])
def test_ranks_of_an_engine_that_differ_stop_the_step(changed: str) -> None:
    """Each would train on its own copy; here both ranks are one."""
    columns = response_columns(has_environment=True, experts=experts_column(8, 2))

    def table(mine: list[Rollout], copies: list[Rollout]) -> list[RolloutInfo]:
        return exchange_table(mine, 4, (), 3, FIRST, columns=columns, copies=copies, num_copies=2)

    done = [replace(rollout_of(i).completion, experts=bytes([i, 7])) for i in range(3)]
    mine = [replace(rollout_of(i), completion=done[i]) for i in range(3)]
    assert len(table(mine, list(mine))) == 3
    other = {
        "token": replace(done[2], token_ids=(3,)),
        "logprob": replace(done[2], logprobs=(-1.0000001,)),
        "mask": replace(done[2], loss_mask=(False,)),
        "experts": replace(done[2], experts=bytes([2, 6])),
    }
    copies = mine[:2]
    if changed != "missing":
        copies = [*copies, replace(mine[2], completion=other[changed])]
    with pytest.raises(RuntimeError, match=r"\[2\].*engine 4"):
        table(mine, copies)
