"""PromptSampler: every prompt once per epoch, and a resume that nobody can tell."""

import itertools
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_rl.data.sampler import ByLength, LengthRanking, PromptSampler, epoch_order

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


def test_epochs_count_what_was_dealt_out():
    sampler = PromptSampler(8, seed=3)
    seen = []
    for count in (2, 6, 4, 8):
        sampler.next(count)
        seen.append(sampler.epochs)
    assert seen == [0.25, 1.0, 1.5, 2.5]
    resumed = PromptSampler(8, seed=3)
    resumed.load_state_dict(sampler.state_dict())
    assert resumed.epochs == 2.5


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


# --- an epoch by length ------------------------------------------------------------------------

lengths_drawn = st.lists(st.integers(1, 40), min_size=1, max_size=30)


@given(lengths_drawn, st.integers(1, 12), st.integers(0, 11), seeds, st.integers(1, 5))
def test_an_order_by_length_is_a_permutation_in_blocks_of_neighbours(
    lengths, block, first, seed, epoch
):
    """No prompt outside of a block has a length strictly between those of the block."""
    ranking = LengthRanking(tuple(lengths), block, first % block)
    order = ranking.order(seed, epoch)
    assert sorted(order) == list(range(len(lengths)))
    assert order == LengthRanking(tuple(lengths), block, first % block).order(seed, epoch)
    borders = [0, *range(first % block, len(order), block), len(order)]
    for start, end in itertools.pairwise(borders):
        inside = [lengths[i] for i in order[start:end]]
        outside = [lengths[i] for i in order[:start] + order[end:]]
        assert not inside or not any(min(inside) < n < max(inside) for n in outside)


def test_blocks_and_prompts_in_them_are_shuffled_by_seed_and_epoch():
    """Twelve prompts of distinct length in blocks of three."""
    ranking = LengthRanking(tuple(range(12)), 3)
    orders = {(s, e): ranking.order(s, e) for s in range(12) for e in (1, 2)}
    assert len({tuple(order) for order in orders.values()}) == len(orders)
    first_blocks = [set(order[:3]) for order in orders.values()]
    assert all(block in first_blocks for block in ({0, 1, 2}, {3, 4, 5}, {6, 7, 8}, {9, 10, 11}))
    within = [tuple(order[k] % 3 for k in range(3)) for order in orders.values()]
    assert len(set(within)) >= 5, "of six orders of three"
    short = [LengthRanking(tuple(range(11)), 3, 1).order(seed, 1)[0] for seed in range(40)]
    assert len(set(short)) > 3, "what fills the open step is of any length"


def test_prompts_of_equal_length_are_in_the_seeds_order():
    """Blocks of a constant length hold other prompts in another epoch."""
    ranking = LengthRanking((7,) * 20, 5)
    assert {*ranking.order(3, 1)[:5]} != {*ranking.order(3, 2)[:5]}


def drawn_by_length(block, count=24, seed=5):
    """A sampler that learns the lengths when the first epoch has been dealt out."""
    known = []
    ordering = ByLength(block, lambda: known)
    return PromptSampler(count, seed, fingerprint="f", by_length=ordering), known


def test_lengths_of_a_step_are_closer_than_in_the_order_without_lengths():
    rng = random.Random(1)
    lengths = [round(rng.lognormvariate(5, 0.8)) for _ in range(64)]

    def spread(order):
        steps = [[lengths[i] for i in order[k : k + 8]] for k in range(0, 64, 8)]
        return sum(max(step) - min(step) for step in steps)

    found = LengthRanking(tuple(lengths), 8).order(2, 1)
    assert spread(found) < 0.4 * spread(epoch_order(64, 2, 1, True))


def test_the_first_epoch_is_as_without_lengths_and_later_ones_are_by_length():
    """The epoch begins within a step: its first two prompts fill it, and steps stay in blocks."""
    sampler, known = drawn_by_length(5, count=23)
    assert sampler.next(20) == epoch_order(23, 5, 0, True)[:20]
    known += [10 * (i % 7) + i for i in range(23)]
    crossing = sampler.next(5)
    assert crossing[:3] == epoch_order(23, 5, 0, True)[20:]
    ranks = sorted(range(23), key=known.__getitem__)
    second = crossing[3:]
    for _ in range(4):
        step = sampler.next(5)
        places = sorted(ranks.index(i) for i in step)
        assert places == list(range(places[0], places[0] + 5)), "neighbours in length"
        second += step
    second += sampler.next(1)
    assert sorted(second) == list(range(23)), "each once"


@given(st.integers(1, 6), st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_a_resume_has_the_order_of_the_uninterrupted_run(block, requests):
    """What was learned since the epoch began does not change it; the next epoch uses it."""
    sampler, known = drawn_by_length(block, count=11)
    again, known_again = drawn_by_length(block, count=11)
    for number, count in enumerate(requests):
        sampler.next(count)
        known[:] = [(i * 7 + number) % 11 + 1 for i in range(11)]
    known_again[:] = [3 * n for n in known]
    again.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    left = 11 - again.state_dict()["position"]
    assert again.next(left) == sampler.next(left)
    known_again[:] = known
    assert again.next(25) == sampler.next(25)


def test_the_order_by_length_may_be_given_or_removed_at_a_resume():
    """The epoch that has begun stays as it is."""
    ordered, known = drawn_by_length(4, count=12)
    ordered.next(12)
    known += range(12, 0, -1)
    ordered.next(4)
    plain = PromptSampler(12, 5, fingerprint="f")
    plain.load_state_dict(ordered.state_dict())
    assert plain.next(8) == ordered.next(8)
    assert plain.next(12) == epoch_order(12, 5, 2, True)
    assert set(plain.state_dict()) == set(PromptSampler(12, 5).state_dict())

    other = PromptSampler(12, 5, fingerprint="f")
    other.next(3)
    ordered.load_state_dict(other.state_dict())
    assert ordered.next(9) == other.next(9)
    assert ordered.next(12) == LengthRanking(tuple(known), 4).order(5, 1)
