"""pass@k against all subsets, and what is reported."""

from __future__ import annotations

from itertools import combinations

import pytest

from mindspeed_rl.algorithms.pass_at_k import pass_at_k, reported_k


@pytest.mark.parametrize("num_samples", [1, 2, 5, 7])
def test_it_is_the_share_of_subsets_with_a_right_sample(num_samples: int) -> None:
    for num_right in range(num_samples + 1):
        right = [i < num_right for i in range(num_samples)]
        for k in range(1, num_samples + 1):
            subsets = list(combinations(right, k))
            share = sum(map(any, subsets)) / len(subsets)
            assert pass_at_k(num_samples, num_right, k) == pytest.approx(share, abs=1e-12)


def test_large_numbers_stay_exact() -> None:
    assert pass_at_k(4096, 1, 1) == pytest.approx(1 / 4096, rel=1e-9)


def test_powers_of_two_and_all() -> None:
    assert [reported_k(n) for n in (1, 2, 3, 8, 12)] == [
        [1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 12],
    ]  # fmt: skip
