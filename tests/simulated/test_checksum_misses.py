"""How many planted changes the checksum misses: what its docstring says, neither more nor less."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from mindspeed_rl.core.boxes import Box
from mindspeed_rl.proof.checksums import box_checksum

ROWS, COLUMNS = 24, 131  # elements; rows of an odd length
PLANTS = 10_000
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.int8}
DTYPES = pytest.mark.parametrize("dtype", BITS)
Bits = torch.Tensor
Change = Callable[[Bits, np.random.Generator], None]


def checksum(bits: Bits, dtype: torch.dtype) -> tuple[int, int]:
    shape = tuple(bits.shape)
    first, second = box_checksum(bits.view(dtype), Box.whole(shape), shape, dtype).tolist()
    return first, second


def digits(bits: Bits) -> np.ndarray:
    """The integers that are weighted, of at most 16 bits."""
    kind = np.int8 if bits.element_size() == 1 else np.int16
    return bits.contiguous().numpy().view(kind).astype(np.int64)


def bound(before: Bits, after: Bits) -> float:
    """The chance that the docstring gives a change of being missed."""
    rows = digits(after) - digits(before)
    changed = rows[rows != 0]
    if len(changed) == 1:
        return 0.0
    zeros = int(np.bitwise_or.reduce(np.abs(changed)))
    lowest = (zeros & -zeros).bit_length() - 1
    several = (rows != 0).any(-1).sum() > 1
    return float(2.0 ** (lowest - 31) * (5 if several else 1))


def place(bits: Bits, draw: np.random.Generator) -> tuple[int, int]:
    return int(draw.integers(bits.shape[0])), int(draw.integers(bits.shape[1]))


def flip(bits: Bits, draw: np.random.Generator, bit: int | None = None) -> None:
    size = 8 * bits.element_size()
    bit = int(draw.integers(size)) if bit is None else bit
    bits[place(bits, draw)] ^= 1 << bit if bit < size - 1 else -(1 << bit)


def flip_one(bits: Bits, draw: np.random.Generator) -> None:
    flip(bits, draw)


def flip_one_bit_of_two(bits: Bits, draw: np.random.Generator) -> None:
    bit = int(draw.integers(8 * bits.element_size()))
    flip(bits, draw, bit)
    flip(bits, draw, bit)


def flip_some(bits: Bits, draw: np.random.Generator) -> None:
    for _ in range(int(draw.integers(3, 9))):
        flip(bits, draw)


def swap_elements(bits: Bits, draw: np.random.Generator) -> None:
    a, b = place(bits, draw), place(bits, draw)
    kept = bits[a].clone()
    bits[a] = bits[b]
    bits[b] = kept


def swap_rows(bits: Bits, draw: np.random.Generator) -> None:
    a, b = draw.integers(bits.shape[0], size=2).tolist()
    bits[[a, b]] = bits[[b, a]]


def swap_columns(bits: Bits, draw: np.random.Generator) -> None:
    a, b = draw.integers(bits.shape[1], size=2).tolist()
    bits[:, [a, b]] = bits[:, [b, a]]


def shift(bits: Bits, draw: np.random.Generator) -> None:
    """A piece that lands some elements or rows away."""
    (row, column), dim = place(bits, draw), int(draw.integers(2))
    piece = bits[row:, column:]
    piece.copy_(piece.roll(1, dim))


def misplace(bits: Bits, draw: np.random.Generator) -> None:
    """Rows of a piece in the place of others."""
    a, b = draw.integers(bits.shape[0] - 4, size=2).tolist()
    bits[a : a + 4] = bits[b : b + 4].clone()


CHANGES: tuple[Change, ...] = (
    flip_one, flip_one_bit_of_two, flip_some, swap_elements, swap_rows, swap_columns, shift,
    misplace,
)  # fmt: skip


@DTYPES
def test_of_ten_thousand_planted_changes_as_few_are_missed_as_is_stated(
    dtype: torch.dtype,
) -> None:
    """Of each kind, in a tensor of random bits."""
    draw = np.random.default_rng(7)
    size = BITS[dtype].itemsize
    raw = draw.integers(256, size=ROWS * COLUMNS * size, dtype=np.uint8)
    bits = torch.from_numpy(raw).view(BITS[dtype]).view(ROWS, COLUMNS)
    whole = checksum(bits, dtype)
    planted, missed, expected = 0, [], 0.0
    while planted < PLANTS:
        change = CHANGES[planted % len(CHANGES)]
        changed = bits.clone()
        change(changed, draw)
        if torch.equal(changed, bits):
            continue  # an element that was swapped with itself
        planted += 1
        chance = bound(bits, changed)
        expected += chance
        if checksum(changed, dtype) == whole:
            missed.append((change.__name__, chance))
    assert expected < 0.1, "what is stated"
    assert missed == []


def test_two_signs_are_missed_as_often_as_is_stated() -> None:
    """The change with the largest chance, for every two columns of a wide row of bfloat16.

    One sign turns up and one down, by 2^15 each. That is missed where the weights of their columns
    agree in their lowest 17 bits: one in 2^16 of all pairs, because the lowest bit is always set.
    """
    count = 20_000
    one, shape = torch.ones(1, 1, dtype=torch.int16).view(torch.bfloat16), (1, count)
    shown = [box_checksum(one, Box((0, j), (1, 1)), shape, one.dtype)[0] for j in range(count)]
    low = np.array(shown) % 2**17  # of the weight of the column x the odd weight of the row
    _, groups, sizes = np.unique(low, return_inverse=True, return_counts=True)
    pairs = int((sizes * (sizes - 1) // 2).sum())
    stated = count * (count - 1) / 2 / 2**16
    assert abs(pairs - stated) < 5 * stated**0.5

    values = torch.zeros(1, count, dtype=torch.int16)
    values[0, 1::2] = -(2**15)
    whole = checksum(values, torch.bfloat16)

    def is_missed(a: int, b: int) -> bool:
        changed = values.clone()
        changed[0, [a, b]] ^= -(2**15)
        return checksum(changed, torch.bfloat16) == whole

    seen = 0
    for group in np.flatnonzero(sizes == 2):
        a, b = np.flatnonzero(groups == group).tolist()
        if a % 2 == b % 2:
            continue  # both signs would turn the same way
        assert is_missed(a, b), "the stated chance is reached"
        assert not is_missed(a, b - 2 if b > a + 2 else b + 2)
        seen += 1
        if seen == 20:
            return
    pytest.fail(f"only {seen} pairs of columns were tried")
