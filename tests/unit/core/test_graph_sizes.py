"""Capture sizes: optimal by brute force, and what padding they predict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.full_disk import largest_file
from support.layout_cases import GQA, spec_of
from support.table_engine import single_rank

from mindspeed_rl.building.engine import graph_sizes
from mindspeed_rl.config import EngineTuningConfig
from mindspeed_rl.core.graph_sizes import (
    AUTO,
    HISTORY_FILE,
    best_graph_sizes,
    decode_batches,
    even_graph_sizes,
    num_default_sizes,
    read_history,
    write_history,
)
from mindspeed_rl.rollout.stats import StepStats, record_history

HISTOGRAMS = st.dictionaries(st.integers(1, 12), st.integers(1, 50), min_size=1)


def padded_rows(histogram: Mapping[int, int], sizes: Sequence[int]) -> int:
    """Rows of all decode steps when each is padded to the next of ``sizes`` (ascending)."""
    return sum(
        steps * next((size for size in sizes if size >= running), running)
        for running, steps in histogram.items()
    )


@given(HISTOGRAMS, st.integers(1, 5))
@settings(deadline=None, max_examples=150)
def test_no_choice_of_sizes_pads_less(histogram: dict[int, int], count: int) -> None:
    """Against every set of at most ``count`` sizes that holds the largest batch."""
    found = best_graph_sizes(histogram, count)
    largest = max(histogram)
    least = min(
        padded_rows(histogram, [*chosen, largest])
        for number in range(count)
        for chosen in combinations(range(1, largest), number)
    )
    assert found.padded_rows == padded_rows(histogram, found.sizes) == least
    assert len(found.sizes) <= count and found.sizes[-1] == largest
    assert list(found.sizes) == sorted(set(found.sizes))
    assert found.waste == pytest.approx(1 - found.rows / found.padded_rows)


@given(HISTOGRAMS)
def test_with_a_graph_for_every_batch_nothing_is_wasted(histogram: dict[int, int]) -> None:
    found = best_graph_sizes(histogram, 12)
    assert found.waste == 0
    assert found.sizes == tuple(sorted(histogram)), "none is captured that never runs"


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 9))
def test_batches_follow_from_lengths(lengths: list[int], capacity: int) -> None:
    """Counted token by token: a response of n tokens runs in n - 1 decode steps."""
    waiting = [length - 1 for length in lengths if length > 1]
    expected: Counter[int] = Counter()
    running: list[int] = []
    while waiting or running:
        while waiting and len(running) < capacity:
            running.append(waiting.pop(0))
        expected[len(running)] += 1
        running = [left - 1 for left in running if left > 1]
    assert decode_batches(lengths, capacity) == expected


def test_the_history_of_a_run_comes_back(tmp_path: Path) -> None:
    assert read_history(tmp_path) == Counter()
    write_history(tmp_path, Counter({64: 10, 3: 7}))
    assert read_history(tmp_path) == {64: 10, 3: 7}
    with largest_file(1):
        record_history(tmp_path, StepStats(running=Counter({5: 1})), 1)
    assert read_history(tmp_path) == Counter({64: 10, 3: 7}), "a full disk ends no run"
    record_history(tmp_path, StepStats(running=Counter({5: 1})), 1)
    assert read_history(tmp_path) == Counter({64: 10, 3: 7, 5: 1})
    (tmp_path / HISTORY_FILE).write_text('{"format": 9}')
    with pytest.raises(ValueError, match=r"decode_batches\.json"):
        read_history(tmp_path)


def job(told: list[str], output: Path, *sizes: str, max_num_seqs: int = 64, count: int = 2) -> Any:
    """A job of rank 0 with these graph sizes."""
    engine = EngineTuningConfig(rollout_graph_sizes=sizes, rollout_graph_count=count)
    config = SimpleNamespace(
        engine=engine,
        logging=SimpleNamespace(output_dir=str(output)),
        engine_options={"max_num_seqs": max_num_seqs},
    )
    return SimpleNamespace(
        config=config,
        plan=SimpleNamespace(spec=spec_of(GQA)),
        platform=SimpleNamespace(name="npu"),
        world=SimpleNamespace(rank=0),
        log_rank0=told.append,
    )


def test_auto_takes_the_best_sizes_of_earlier_steps_and_tells_their_waste(tmp_path: Path) -> None:
    """160 rows in graphs of 5 and 8 are 180; of 3 and 8 they would be 190."""
    write_history(tmp_path, Counter({3: 10, 5: 10, 8: 10}))
    told: list[str] = []
    with single_rank():
        assert graph_sizes(job(told, tmp_path, *AUTO)) == (5, 8)
    assert told == [
        f"graph sizes 5 8: over the 30 decode steps of {tmp_path}, 11.1% of the rows would be "
        "padding"
    ]
    assert graph_sizes(job(told, tmp_path, "8", "2", "8")) == (2, 8)


def test_auto_takes_no_size_that_this_engine_cannot_run(tmp_path: Path) -> None:
    """Its largest size decides how large the buffer for the dispatch of experts has to be."""
    write_history(tmp_path, Counter({4: 10, 64: 5, 96: 5}))
    with single_rank():
        assert graph_sizes(job([], tmp_path, *AUTO, max_num_seqs=32)) == (4, 32)


def test_auto_without_earlier_steps_takes_equal_distances(tmp_path: Path) -> None:
    told: list[str] = []
    with single_rank():
        sizes = graph_sizes(job(told, tmp_path, *AUTO, max_num_seqs=30, count=4))
    assert sizes == (8, 15, 23, 30) and "8 15 23 30" in told[0]
    assert even_graph_sizes(3, 16) == (1, 2, 3)


@pytest.mark.parametrize(("sequences", "count"), [(1, 1), (7, 3), (64, 11), (256, 35), (4096, 51)])
def test_the_number_of_sizes_that_the_engine_takes_itself(sequences: int, count: int) -> None:
    """As written out by vLLM's docstring: 1, 2, 4, every 8th below 256, every 16th up to 512."""
    assert num_default_sizes(sequences) == count
