"""An entry of the cache is written once, read as what it is, and gone when its step is over."""

from __future__ import annotations

import pytest
import torch

from mindspeed_rl.samples.columns import ROLLOUT_LOGPROBS, TOKEN_IDS, Column
from mindspeed_rl.samples.device_cache import SamplePart, TensorCache, as_words, join
from mindspeed_rl.samples.rollout_info import SampleKey

KEYS = [SampleKey(1, n) for n in range(3)]
LENGTHS = (2, 0, 3)
VALUES = torch.arange(5, dtype=torch.int32)


def filled() -> TensorCache:
    """Three ragged samples of step 1: tokens of versions 7, 8, 9."""
    cache = TensorCache(torch.device("cpu"))
    cache.begin_step(1)
    cache.put(TOKEN_IDS, KEYS, VALUES, LENGTHS, (7, 8, 9))
    return cache


def test_every_sample_gets_its_own_part() -> None:
    cache = filled()
    found = [cache.read(TOKEN_IDS, key, 7 + n).tolist() for n, key in enumerate(KEYS)]
    assert found == [[0, 1], [], [2, 3, 4]]
    wide = Column("experts", torch.uint8, "the engine", 4)
    cache.put(wide, KEYS, torch.arange(20), LENGTHS, (7, 8, 9))
    last = cache.read(wide, KEYS[2], 9)
    assert last.tolist() == list(range(8, 20)) and last.dtype is torch.uint8
    assert cache.num_bytes == 5 * 4 + 20


@pytest.mark.parametrize(
    "column", [TOKEN_IDS, ROLLOUT_LOGPROBS, Column("experts", torch.uint8, "the engine", 4)]
)
def test_several_samples_are_read_at_once(column: Column) -> None:
    """In the order asked for, put here or arrived as words, those without tokens as well."""
    cache = filled()
    values = (torch.arange(5 * column.width) * 3).to(column.dtype)
    keys = [SampleKey(1, n) for n in range(10, 13)]
    cache.put(column, keys, values, LENGTHS, (7, 7, 7))
    arrived = SampleKey(1, 13)
    cache.put_parts(column, [arrived], [7], [SamplePart(values.view(torch.int32), 0, 5)])
    order = [keys[2], arrived, keys[1], keys[0]]
    parts = [cache.find(column, key, 7) for key in order]
    found = join(column, parts, cache.device)
    assert found.dtype is column.dtype
    assert found.tolist() == torch.cat([cache.read(column, key, 7) for key in order]).tolist()
    assert found[: 3 * column.width].tolist() == values[2 * column.width :].tolist()
    assert join(column, [], cache.device).tolist() == []


def test_only_neighbours_are_one_view() -> None:
    """Behind each other in one buffer: not across a gap, nor where another buffer goes on."""
    one, other = torch.arange(10, dtype=torch.int32), torch.arange(20, 30, dtype=torch.int32)
    parts = [
        SamplePart(one, 1, 2),
        SamplePart(one, 3, 1),
        SamplePart(one, 5, 2),
        SamplePart(other, 7, 3),
        SamplePart(one, 0, 0),
    ]
    views = as_words(TOKEN_IDS, parts)
    assert [v.tolist() for v in views] == [[1, 2, 3], [5, 6], [27, 28, 29], []]
    assert views[0].data_ptr() == one[1:].data_ptr()


def test_an_entry_is_written_once() -> None:
    """Another version, and another tensor, are entries of their own."""
    cache = filled()
    with pytest.raises(RuntimeError, match="'token_ids' of sample 0 of step 1 "):
        cache.put(TOKEN_IDS, KEYS[:1], VALUES[:2] + 5, (2,), (7,))
    assert cache.read(TOKEN_IDS, KEYS[0], 7).tolist() == [0, 1]
    cache.put(TOKEN_IDS, KEYS[:1], VALUES[:2] + 5, (2,), (8,))
    cache.put(ROLLOUT_LOGPROBS, KEYS[:1], torch.tensor([-1.0, -2.0]), (2,), (7,))
    assert cache.read(TOKEN_IDS, KEYS[0], 7).tolist() == [0, 1]
    assert cache.read(TOKEN_IDS, KEYS[0], 8).tolist() == [5, 6]


@pytest.mark.parametrize(
    ("column", "key", "version", "message"),
    [
        (TOKEN_IDS, SampleKey(1, 0), 8, "version 8 cannot be read: the cache has version 7"),
        (
            ROLLOUT_LOGPROBS,
            SampleKey(1, 0),
            7,
            "'rollout_logprobs' .* neither made nor received it",
        ),
        (TOKEN_IDS, SampleKey(1, 5), 7, "sample 5 of step 1 .* neither made nor received it"),
        (TOKEN_IDS, SampleKey(0, 0), 7, "it was not carried over into step 1"),
        (TOKEN_IDS, SampleKey(2, 0), 7, "sample 0 of step 2 .* neither made nor received it"),
    ],
)
def test_nothing_else_is_read_in_its_place(
    column: Column, key: SampleKey, version: int, message: str
) -> None:
    cache = filled()
    with pytest.raises(RuntimeError, match=message):
        cache.read(column, key, version)


def test_a_new_step_drops_all_but_what_is_carried_over() -> None:
    """Memory of the others is free: what stays is a copy of its own."""
    cache = filled()
    cache.begin_step(2, [KEYS[2], SampleKey(1, 99)])
    kept = cache.read(TOKEN_IDS, KEYS[2], 9)
    assert kept.tolist() == [2, 3, 4] and kept.untyped_storage().nbytes() == 3 * 4
    assert cache.num_bytes == 3 * 4
    with pytest.raises(RuntimeError, match=r"sample 0 of step 1 .*step 2"):
        cache.read(TOKEN_IDS, KEYS[0], 7)
    cache.put(TOKEN_IDS, [SampleKey(2, 2)], VALUES[:1], (1,), (9,))
    assert cache.read(TOKEN_IDS, KEYS[2], 9).tolist() == [2, 3, 4], (
        "numbers begin anew in every step"
    )
    cache.put(TOKEN_IDS, [SampleKey(1, 99)], VALUES[:1], (1,), (9,))  # it comes from another rank
    with pytest.raises(RuntimeError, match="sample 1 of step 1 "):
        cache.put(TOKEN_IDS, [KEYS[1]], VALUES[:1], (1,), (8,))
    cache.begin_step(3)
    assert cache.num_bytes == 0


def test_steps_go_forward() -> None:
    cache = filled()
    with pytest.raises(RuntimeError, match="step 1"):
        cache.begin_step(1)
    with pytest.raises(RuntimeError, match="step 2"):
        cache.put(TOKEN_IDS, [SampleKey(2, 0)], VALUES, (5,), (0,))
