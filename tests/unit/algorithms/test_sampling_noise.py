"""Noise for sampling: its distribution, its independence, and what it depends on."""

from __future__ import annotations

import math

import pytest
import torch

from mindspeed_rl.algorithms import sampling_noise
from mindspeed_rl.algorithms.sampling_noise import (
    _token_constants,
    draw_keys,
    draw_tokens,
    exponential_noise,
)
from mindspeed_rl.engines.vllm_ascend import sampling
from mindspeed_rl.vllm_patches import seeded_draws

DRAWS = 100_000
# A request of many tokens, many requests at one token, and both at once.
STREAMS = {
    "one request": ([0x1234_5678_9ABC_DEF0] * DRAWS, range(DRAWS)),
    "neighbouring seeds": (range(7, 7 + DRAWS), [40] * DRAWS),
    "both": ([2**62 + 2**31 * i for i in range(DRAWS)], [i % 97 for i in range(DRAWS)]),
}
streams = pytest.mark.parametrize("stream", STREAMS)


def noise(stream: str, size: int) -> torch.Tensor:
    return exponential_noise(draw_keys(*STREAMS[stream]), size)


def assert_counts(counts: torch.Tensor, expected: torch.Tensor) -> None:
    """Pearson's chi-square statistic is within five standard deviations of its mean."""
    cells = counts.numel()
    assert cells == expected.numel() and float(expected.min()) > 20
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert abs(statistic - (cells - 1)) < 5 * math.sqrt(2 * (cells - 1)), statistic


def splitmix(x: int) -> int:
    """The published permutation, in integers of any size."""
    mask = 2**64 - 1
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return x ^ x >> 31


@pytest.mark.parametrize("product", [1, 2**31 - 1, -(2**31 - 1)])
def test_the_largest_and_smallest_noise_are_finite_and_above_0(product: int) -> None:
    """Products of which fp32 rounds to 2^31, and the smallest one."""
    first, second = (int(table[0]) for table in _token_constants(1, torch.device("cpu")))
    last = product * pow((first ^ 1) ^ second, -1, 2**32) % 2**32
    keys = torch.tensor([1, 1, last - 2**32 * (last >= 2**31)], dtype=torch.int32)
    found = float(exponential_noise(keys.view(3, 1, 1), 1))
    assert found == pytest.approx(2.0**-31 if product == 1 else 24 * math.log(2), rel=1e-6)


@streams
def test_tokens_are_drawn_with_their_probabilities(stream: str) -> None:
    probs = torch.tensor([0.3, 0.002, 0.04, 0.15, 0.0, 0.001, 0.22, 0.007, 0.08, 0.12, 0.05, 0.03])
    tokens = draw_tokens(probs.repeat(DRAWS, 1), draw_keys(*STREAMS[stream]))
    counts = torch.bincount(tokens, minlength=12)
    assert counts[4] == 0
    possible = probs > 0
    assert_counts(counts[possible].double(), probs[possible].double() * DRAWS)


@streams
def test_noise_is_exponential(stream: str) -> None:
    """Of each token, in cells of equal probability down to a thousandth."""
    uniform = -torch.expm1(-noise(stream, 3).double())
    for token in range(3):
        counts = torch.histc(uniform[:, token], 1000, 0.0, 1.0)
        assert_counts(counts, torch.full((1000,), DRAWS / 1000))
    assert float(uniform.min()) > 0


@streams
def test_tokens_and_draws_are_independent(stream: str) -> None:
    """Of two tokens, three tokens, and a token in this and the next draw."""
    cells = (-torch.expm1(-noise(stream, 40)) * 8).long().clamp(max=7)
    for first, second in ((0, 1), (1, 2), (3, 39), (16, 32)):
        pair = cells[:, first] * 8 + cells[:, second]
        assert_counts(torch.bincount(pair, minlength=64), torch.full((64,), DRAWS / 64))
    three = (cells[:, 4] * 8 + cells[:, 5]) * 8 + cells[:, 6]
    assert_counts(torch.bincount(three, minlength=512), torch.full((512,), DRAWS / 512))
    for later in (0, 1):
        pair = cells[:-1, 0] * 8 + cells[1:, later]
        assert_counts(torch.bincount(pair, minlength=64), torch.full((64,), (DRAWS - 1) / 64))


def test_no_token_of_a_large_vocabulary_is_preferred() -> None:
    """Which token has the least noise, over 20 000 draws of 4096 tokens; and how little it is."""
    least = [
        exponential_noise(draw_keys(range(i, i + 500), [8] * 500), 4096).min(-1)
        for i in range(0, 20_000, 500)
    ]
    winners = torch.cat([found.indices for found in least])
    counts = torch.bincount(winners // 64, minlength=64)
    assert_counts(counts, torch.full((64,), 20_000 / 64))
    uniform = -torch.expm1(-4096 * torch.cat([found.values for found in least]).double())
    assert_counts(torch.histc(uniform, 64, 0.0, 1.0), torch.full((64,), 20_000 / 64))


def test_a_row_follows_from_its_seed_and_draw_alone() -> None:
    """In any batch and at any place in it."""
    seeds, draws = (11, 2**63 - 1, 11, 5), (0, 8, 4, 4)
    whole = exponential_noise(draw_keys(seeds, draws), 60)
    for i, (seed, draw) in enumerate(zip(seeds, draws, strict=True)):
        (alone,) = exponential_noise(draw_keys([seed], [draw]), 60)
        assert torch.equal(whole[i], alone)
    assert len({tuple(row.tolist()) for row in whole}) == 4


def test_tokens_do_not_depend_on_the_chunks_in_which_they_are_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are the largest of probability / noise, in any number of rows at once."""
    keys = draw_keys(range(3, 26), range(100, 123))
    probs = torch.randn(23, 50, generator=torch.Generator().manual_seed(1)).softmax(-1)
    expected = (probs / exponential_noise(keys, 50)).argmax(-1)
    for numbers in (1, 100, 101, 5000):
        monkeypatch.setattr(sampling_noise, "_CHUNK_ON_CPU", numbers)
        assert torch.equal(draw_tokens(probs.clone(), keys), expected)


def test_keys_are_pinned() -> None:
    """A resumed run of a later release, and a run on another machine, draw the same tokens."""
    keys = draw_keys([0, 2**63 - 1], [1, 2**20])
    mask, words = 2**64 - 1, []
    for seed, position in ((0, 1), (2**63 - 1, 2**20)):
        first = splitmix(splitmix(seed) + position * 0x9E3779B97F4A7C15 & mask)
        second = splitmix(first + 0x9E3779B97F4A7C15 & mask)
        words.append([first & 0xFFFFFFFF, first >> 32, second & 0xFFFFFFFF])
    assert (keys.squeeze(-1).T.long() & 0xFFFFFFFF).tolist() == [[w | 1 for w in r] for r in words]


def test_a_device_with_other_noise_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is patched then."""
    right = exponential_noise(draw_keys([1], [0]), 8)
    found = iter((right, right.clamp(max=0.5)))
    monkeypatch.setattr(seeded_draws, "exponential_noise", lambda *_: next(found))
    monkeypatch.setattr(sampling, "apply_patch", lambda patch: pytest.fail("patched"))
    with pytest.raises(RuntimeError, match="noise for sampling on cpu differs"):
        sampling.draw_in_batches(torch.device("cpu"))
