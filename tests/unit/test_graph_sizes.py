"""Capture sizes: optimal by brute force, and what padding they predict."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl.rollout.graph_sizes import (
    HISTORY_FILE,
    best_graph_sizes,
    decode_batches,
    padded_rows,
    read_history,
    write_history,
)

HISTOGRAMS = st.dictionaries(st.integers(1, 12), st.integers(1, 50), min_size=1)


@given(HISTOGRAMS, st.integers(1, 5), st.sampled_from([1, 2, 4]))
@settings(deadline=None, max_examples=150)
def test_no_choice_of_sizes_pads_less(histogram: dict[int, int], count: int, multiple: int) -> None:
    """Against every set of at most ``count`` sizes that holds the largest batch."""
    found = best_graph_sizes(histogram, count, multiple)
    largest = -(-max(histogram) // multiple) * multiple
    others = range(multiple, largest, multiple)
    least = min(
        padded_rows(histogram, [*chosen, largest])
        for number in range(count)
        for chosen in combinations(others, number)
    )
    assert found.padded_rows == padded_rows(histogram, found.sizes) == least
    assert len(found.sizes) <= count and found.sizes[-1] == largest
    assert all(size % multiple == 0 for size in found.sizes)
    assert list(found.sizes) == sorted(set(found.sizes))
    assert found.waste == pytest.approx(1 - found.rows / found.padded_rows)


@given(HISTOGRAMS)
def test_with_a_graph_for_every_batch_nothing_is_wasted(histogram: dict[int, int]) -> None:
    found = best_graph_sizes(histogram, 12)
    assert found.waste == 0
    assert found.sizes == tuple(sorted(histogram)), "none is captured that never runs"


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 4))
def test_batches_follow_from_lengths(lengths: list[int], capacity: int) -> None:
    """Counted token by token: a response of n tokens runs in n - 1 decode steps."""
    waiting = [length - 1 for length in lengths if length > 1]
    expected: Counter[int] = Counter()
    running: list[int] = []
    while waiting or running:
        while waiting and (not capacity or len(running) < capacity):
            running.append(waiting.pop(0))
        expected[len(running)] += 1
        running = [left - 1 for left in running if left > 1]
    assert decode_batches(lengths, capacity) == expected


def test_the_history_of_a_run_comes_back(tmp_path: Path) -> None:
    assert read_history(tmp_path) == Counter()
    write_history(tmp_path, Counter({64: 10, 3: 7}))
    assert read_history(tmp_path) == {64: 10, 3: 7}
    (tmp_path / HISTORY_FILE).write_text('{"format": 9}')
    with pytest.raises(ValueError, match=r"decode_batches.json is not a histogram.*remove it"):
        read_history(tmp_path)


def test_an_empty_history_has_no_best_sizes() -> None:
    with pytest.raises(ValueError, match="needs a decode step"):
        best_graph_sizes({}, 4)
