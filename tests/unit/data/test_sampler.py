"""PromptSampler: every prompt once per epoch, and a resume that nobody can tell."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_rl.data.sampler import PromptSampler, epoch_order

sizes = st.integers(1, 20)
counts = st.lists(st.integers(1, 30), min_size=1, max_size=8)
seeds = st.integers(0, 2**40)


@given(sizes, seeds, counts, st.booleans())
def test_each_epoch_is_a_permutation(num_prompts, seed, requests, shuffle):
    sampler = PromptSampler(num_prompts, seed, shuffle)
    stream = [index for count in requests for index in sampler.next(count)]
    assert len(stream) == sum(requests)
    for start in range(0, len(stream), num_prompts):
        epoch = stream[start : start + num_prompts]
        assert set(epoch) <= set(range(num_prompts))
        assert len(set(epoch)) == len(epoch)
        if not shuffle:
            assert epoch == list(range(len(epoch)))


@given(sizes, seeds, counts, counts)
def test_stream_does_not_depend_on_the_request_sizes(num_prompts, seed, requests, others):
    one, other = PromptSampler(num_prompts, seed), PromptSampler(num_prompts, seed)
    a = [index for count in requests for index in one.next(count)]
    b = [index for count in others for index in other.next(count)]
    shared = min(len(a), len(b))
    assert a[:shared] == b[:shared]


@given(sizes, seeds, counts, counts, st.booleans())
def test_resume_anywhere_equals_uninterrupted(num_prompts, seed, before, after, shuffle):
    uninterrupted = PromptSampler(num_prompts, seed, shuffle, fingerprint="f")
    for count in before:
        uninterrupted.next(count)
    state = json.loads(json.dumps(uninterrupted.state_dict()))
    resumed = PromptSampler(num_prompts, seed, shuffle, fingerprint="f")
    resumed.next(1)  # a sampler that already moved must take over the whole state
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    for count in after:
        assert resumed.next(count) == uninterrupted.next(count)


def test_epochs_and_seeds_differ_and_shuffling_moves_prompts():
    sampler = PromptSampler(100, seed=0)
    first, second = sampler.next(100), sampler.next(100)
    assert len({tuple(first), tuple(second), tuple(range(100))}) == 3
    assert PromptSampler(100, seed=1).next(100) != first


def test_order_is_pinned():
    # A checkpoint resumed under another Python version must go on with the same prompts.
    assert epoch_order(8, seed=0, epoch=0, shuffle=True) == [0, 3, 7, 4, 1, 5, 2, 6]


def test_global_random_state_is_neither_read_nor_moved():
    random.seed(1)
    before = random.getstate()
    first = PromptSampler(50, seed=0).next(70)
    assert random.getstate() == before
    random.seed(2)
    assert PromptSampler(50, seed=0).next(70) == first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fingerprint": "new"}, r"fingerprint \(saved 'old', now 'new'\)"),
        ({"num_prompts": 11}, r"num_prompts \(saved 10, now 11\)"),
        ({"seed": 4}, r"seed \(saved 3, now 4\)"),
        ({"shuffle": False}, r"shuffle \(saved True, now False\)"),
    ],
)
def test_changed_data_is_refused_unless_allowed(change, message):
    arguments = {"num_prompts": 10, "seed": 3, "shuffle": True, "fingerprint": "old"}
    saved = PromptSampler(**arguments)
    saved.next(14)
    resumed = PromptSampler(**{**arguments, **change})
    with pytest.raises(ValueError, match=message):
        resumed.load_state_dict(saved.state_dict())
    assert resumed.state_dict()["position"] == 0  # a refused state leaves no trace

    resumed.load_state_dict(saved.state_dict(), allow_changed_data=True)
    num_prompts = change.get("num_prompts", 10)
    assert resumed.state_dict()["epoch"] == 2  # the state was taken in epoch 1
    assert sorted(resumed.next(num_prompts)) == list(range(num_prompts))


def test_allowing_changes_does_not_touch_an_unchanged_resume():
    saved = PromptSampler(10, 3, fingerprint="f")
    saved.next(14)
    resumed = PromptSampler(10, 3, fingerprint="f")
    resumed.load_state_dict(saved.state_dict(), allow_changed_data=True)
    assert resumed.next(9) == saved.next(9)


def test_foreign_state_is_refused():
    with pytest.raises(ValueError, match=r"\['step'\].*PromptSampler"):
        PromptSampler(10, 0).load_state_dict({"step": 3})
