"""Seeds and digests of requests: what a sample is, not where it runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from mindspeed_rl.rollout.requests import (
    GenerationRequest,
    SamplingSettings,
    request_seed,
    requests_digest,
)

SETTINGS = SamplingSettings(temperature=1.0, max_response_tokens=8, stop_token_ids=(1,))
REQUESTS = [GenerationRequest(0, (5, 6), 11), GenerationRequest(1, (7,), 12)]


def test_seeds_of_a_run_are_all_different() -> None:
    """Steps, samples, attempts and run seeds never share a random stream; engines take 63 bits."""
    seeds = [request_seed(*key) for key in product((0, 1234), range(20), range(50), range(3))]
    assert len(set(seeds)) == len(seeds) and min(seeds) >= 0 and max(seeds) < 2**63


def test_seeds_are_pinned() -> None:
    """A resumed run of a later release samples the same responses."""
    assert request_seed(1234, 0, 0) == 2657122914523097498
    assert request_seed(1234, 7, 3, 1) == request_seed(1234, 7, 3, k=1)
    assert request_seed(1234, 7, 3) == request_seed(1234, 7, 3, k=0)


def test_bits_of_seeds_are_balanced() -> None:
    seeds = [request_seed(0, step, sample) for step in range(40) for sample in range(25)]
    for bit in range(63):
        ones = sum(seed >> bit & 1 for seed in seeds)
        assert 400 < ones < 600, f"bit {bit}: {ones} of 1000"


@pytest.mark.parametrize(
    ("requests", "settings", "version"),
    [
        (REQUESTS[::-1], SETTINGS, 3),
        (REQUESTS[:1], SETTINGS, 3),
        ([GenerationRequest(0, (5, 6, 1, 12, 7), 11)], SETTINGS, 3),
        ([replace(REQUESTS[0], sample_id=2), REQUESTS[1]], SETTINGS, 3),
        ([replace(REQUESTS[0], seed=12), REQUESTS[1]], SETTINGS, 3),
        ([replace(REQUESTS[0], token_ids=(6, 5)), REQUESTS[1]], SETTINGS, 3),
        ([replace(REQUESTS[0], token_ids=(5,)), REQUESTS[1]], SETTINGS, 3),
        (REQUESTS, replace(SETTINGS, temperature=0.5), 3),
        (REQUESTS, replace(SETTINGS, max_response_tokens=9), 3),
        (REQUESTS, replace(SETTINGS, stop_token_ids=(1, 2)), 3),
        (REQUESTS, SETTINGS, 4),
    ],
)
def test_any_difference_changes_the_digest(
    requests: list[GenerationRequest], settings: SamplingSettings, version: int
) -> None:
    assert requests_digest(requests, settings, version) != requests_digest(REQUESTS, SETTINGS, 3)


def test_equal_requests_have_equal_digests() -> None:
    digest = requests_digest(REQUESTS, SETTINGS, 3)
    assert len(digest) == 16
    assert digest == requests_digest([replace(r) for r in REQUESTS], replace(SETTINGS), 3)
