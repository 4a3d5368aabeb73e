"""The code of changed words: exact to the bit, as short as its entropy says, never much longer."""

from __future__ import annotations

from dataclasses import replace
from math import log2

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mindspeed_rl.deltas.codec import (
    HEAD_BYTES,
    HEAD_INTS,
    DamagedMessageError,
    PieceHead,
    decode,
    encode,
    pieces_of,
)

# NaN with payloads, -0.0, 0.0, infinities, the least and the largest numbers, as bits of bfloat16.
ODD_WORDS = (0x7FC0, 0xFFC1, 0x7F81, 0x8000, 0x0000, 0x7F80, 0xFF80, 0x0001, 0x8001, 0x7F7F, 0x7FFF)


def coded(old: torch.Tensor, new: torch.Tensor) -> tuple[PieceHead, int]:
    """The head of a piece and its bytes, after it was decoded to the same bits."""
    head, code = encode(old, new)
    assert len(code) == head.num_bytes(len(new), new.element_size()) and code.dtype is torch.uint8
    words = old.clone()
    decode(head, code, words)
    assert torch.equal(words, new)
    return head, len(code)


def words(values: list[int], bits: int) -> torch.Tensor:
    """Unsigned words as tensors have them."""
    array = np.array(values, dtype=np.uint16 if bits == 16 else np.uint32)
    return torch.from_numpy(array.view(np.int16 if bits == 16 else np.int32).copy())


@st.composite
def pairs(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """Old and new words, few or many of which differ, by a little or by anything."""
    bits = draw(st.sampled_from((16, 32)))
    size = draw(st.integers(1, 200))
    word = st.integers(0, 2**bits - 1)
    odd = st.sampled_from([w << (bits - 16) for w in ODD_WORDS])
    old = draw(st.lists(word | odd, min_size=size, max_size=size))
    new = list(old)
    for _ in range(draw(st.integers(0, size))):
        place = draw(st.integers(0, size - 1))
        step = draw(st.sampled_from((1, -1)) | st.integers(-9, 9))
        new[place] = draw(st.just((old[place] + step) % 2**bits) | word | odd)
    return old, new, bits


@given(pairs())
@settings(max_examples=300, deadline=None)
@example(([0] * 64, [0x8000] + [0] * 63, 16))  # 0.0 to -0.0, the farthest of all
@example(([0x7FFF] * 64, [0x8000] * 2 + [0x7FFF] * 62, 16))
@example(([0] * 64, [0x80000000] + [0] * 63, 32))
@example(([0x80000001] * 64, [0x7FFFFFFF] + [0x80000001] * 63, 32))
@example(([5], [6], 16))
@example(([0x7FC0] * 100, [0x7FC1] + [0x7FC0] * 98 + [0xFFFF], 16))
def test_every_bit_pattern_comes_back(pair: tuple[list[int], list[int], int]) -> None:
    old, new, bits = pair
    coded(words(old, bits), words(new, bits))


def test_all_pairs_of_odd_words() -> None:
    """Each becomes each, among words that stay."""
    for before in ODD_WORDS:
        for after in ODD_WORDS:
            old = words([before] * 40, 16)
            new = old.clone()
            new[7] = words([after], 16)[0]
            head, _ = coded(old, new)
            assert head.changed == int(before != after)


def entropy_bits(share: float, far: float, num_words: int) -> float:
    """Of words that change independently, up or down; of these a share by 2 to 5, evenly."""

    def binary(p: float) -> float:
        return 0.0 if p in (0, 1) else -p * log2(p) - (1 - p) * log2(1 - p)

    return num_words * (binary(share) + share * (1 + binary(far) + 2 * far))


def drawn(share: float, far: float, num_words: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Old and new words that change as :func:`entropy_bits` says."""
    draws = np.random.default_rng([num_words, round(1e6 * share), round(100 * far)])
    old = draws.integers(-(2**15), 2**15, num_words, dtype=np.int64)
    up = draws.choice((-1, 1), num_words)
    by = np.where(draws.random(num_words) < far, draws.integers(2, 6, num_words), 1)
    new = old + np.where(draws.random(num_words) < share, up * by, 0)
    return torch.from_numpy(old.astype(np.int16)), torch.from_numpy(new.astype(np.int16))


@pytest.mark.parametrize("far", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("share", [0.0003, 0.001, 0.004, 0.01, 0.03, 0.1, 0.2, 0.35, 0.5])
def test_bytes_are_within_1_15_of_the_entropy(share: float, far: float) -> None:
    """Of the source that the words were drawn from, heads included."""
    num_words = 1 << 20
    head, size = coded(*drawn(share, far, num_words))
    assert abs(head.changed - share * num_words) < 5 * (share * num_words) ** 0.5
    assert HEAD_BYTES + size <= 1.15 * entropy_bits(share, far, num_words) / 8


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
@pytest.mark.parametrize("size", [1, 2, 3, 1000, 4097])
def test_words_that_all_changed_travel_as_they_are(dtype: torch.dtype, size: int) -> None:
    """No longer than before, up to the alignment of four bytes."""
    most = torch.iinfo(dtype).max
    draws = torch.Generator().manual_seed(size)
    old, new = (torch.randint(-most, most, (size,), generator=draws, dtype=dtype) for _ in "ab")
    head, length = coded(old, torch.where(old == new, new + 1, new))
    assert head.is_plain and old.nbytes <= length < old.nbytes + 4


def test_far_moves_of_most_words_are_not_coded_at_greater_length() -> None:
    """A code that would be longer than the words is not taken."""
    draws = torch.Generator().manual_seed(3)
    old = torch.zeros(1000, dtype=torch.int16)
    new = torch.randint(9000, 32000, (1000,), generator=draws, dtype=torch.int16)
    new[::3] = 0
    head, size = coded(old, new)
    assert head.changed == -1 and size == old.nbytes


def test_equal_words_cost_nothing() -> None:
    same = torch.arange(-500, 500, dtype=torch.int16)
    assert coded(same, same.clone()) == (PieceHead(0), 0)


def test_messages_are_cut_into_pieces() -> None:
    full = 1 << 20
    assert pieces_of(full) == [full] and pieces_of(5) == [5]
    assert pieces_of(2 * full + 3) == [full, full, 3]


@pytest.mark.parametrize(
    "wrong",
    [{"changed": 200}, {"changed": -2}, {"far": 12}, {"shifts": 40 * 32}, {"shifts": -1},
     {"gap_bits": 5},
     {"far_bits": 900}, {"class_bits": 10**6}],
)  # fmt: skip
def test_heads_that_cannot_be_are_refused(wrong: dict[str, int]) -> None:
    old, new = drawn(0.1, 0.3, 100)
    head, code = encode(old, new)
    head.check(100)
    with pytest.raises(DamagedMessageError, match="is not the head of a piece of 100 words"):
        decode(replace(head, **wrong), code, old)


def test_a_head_of_which_any_bit_changed_on_its_way_is_refused() -> None:
    """Also where the numbers are possible, so that another size would be expected."""
    head, _ = encode(*drawn(0.1, 0.3, 100))
    row = list(head.row())
    assert len(row) == HEAD_INTS and PieceHead.of_row(row, 100) == head
    for place in range(HEAD_INTS):
        for bit in range(32):
            wrong = row.copy()
            flipped = (wrong[place] ^ 1 << bit) % 2**32
            wrong[place] = flipped - 2**32 * (flipped >= 2**31)
            with pytest.raises(DamagedMessageError, match="arrived with the CRC-32"):
                PieceHead.of_row(wrong, 100)


def set_bits(code: torch.Tensor, first: int, count: int, value: int) -> torch.Tensor:
    """The code with other bits in one place."""
    bits = np.unpackbits(code.numpy(), bitorder="little")
    bits[first : first + count] = value
    return torch.from_numpy(np.packbits(bits, bitorder="little"))


@pytest.mark.parametrize("part", [0, 2])
def test_positions_beyond_a_piece_are_refused(part: int) -> None:
    """Of changed words, and of those that moved far: all low bits of their gaps are ones."""
    old, new = drawn(0.02, 0.1, 4000)
    head, code = encode(old, new)
    sections, before = head.sections(), old.clone()
    assert sections[part] > 0
    wrong = set_bits(code, sum(sections[:part]), sections[part], 1)
    with pytest.raises(DamagedMessageError, match="names words that it does not have"):
        decode(head, wrong, old)
    assert torch.equal(old, before)


def test_a_distance_that_no_word_can_move_is_refused() -> None:
    """Its number of bits is taken from the distances after it, so that all lengths are right."""
    old = torch.zeros(64, dtype=torch.int16)
    new = old.clone()
    new[[3, 40]] = torch.tensor([20_000, -9_000], dtype=torch.int16)
    head, code = encode(old, new)
    sections = head.sections()
    assert head.far == 2 and head.class_bits == 14 + 13 + 2
    first = sum(sections[:5])
    wrong = set_bits(set_bits(code, first, head.class_bits, 0), first + 26, 1, 1)
    wrong = set_bits(wrong, first + 28, 1, 1)
    with pytest.raises(DamagedMessageError, match="names words that it does not have"):
        decode(head, wrong, old)


def test_a_code_that_lost_an_entry_is_refused() -> None:
    old, new = drawn(0.1, 0.3, 1000)
    head, code = encode(old, new)
    with pytest.raises(DamagedMessageError, match="where its head says"):
        decode(head, torch.zeros_like(code), old)
