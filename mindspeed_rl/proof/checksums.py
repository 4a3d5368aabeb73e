"""A checksum of a tensor's bits that does not depend on how the tensor is cut.

A row is a line along the last dimension; rows are numbered in row-major order. The bits of an
element are taken as digits, integers with sign: one of 8 or 16 bits, or two of 16 bits where an
element has four bytes. Each digit of a row has an odd random weight c, and each row two odd random
weights r and r'. The checksum is the pair

    sum over rows of r x (sum over the row of c x digit),  and the same with r',  modulo 2^32.

It is linear: trainer and engine add up what their own pieces give. Digits are never joined to
words, so that pieces may begin at any element and a row may have any number of them.

What it costs. The inner sums, :func:`sum_rows`, are made on the device of the values in two
kernels per piece, which may be the same rectangle of several matrices in one parameter (of a larger
one per 2^24 digits). The product of digits and weights reads 2 bytes
per digit of 16 bits and writes 4, its sum reads 4: 10 bytes per element of two bytes, 9 of one, 20
of four. A CPU widens the digits first and multiplies within the sum: also two kernels, and
2 + 4 + 4 bytes. CANN's product takes two tensors of one type; widening is a third kernel there, and
the traffic 2 + 4 + 4 + 4 + 4 bytes. The weights of columns serve all rows, those of rows all
tensors; both are made once. Nothing but products and sums of integers of 32 bits is asked of a
device: the vector units of Atlas A2 and A3 have no products of 64 bits, and no kernel that shifts
integers. The outer sums, :func:`fold_rows`, are the host's: four bytes per row.

What it misses. Let D be the difference of the digits of two tensors, and v the number of trailing
zero bits that all of D has in common: at most 15, and 0 where the lowest bit of any digit changed.

- One changed digit, and so any one changed bit, is always found: weights are odd, and digits differ
  by less than 2^16.
- Any other fixed D is missed by at most a share of 2^(v - 31) of all weights where one row changed,
  and of 5 x 2^(v - 31) where several did: 2^-28 where a lowest bit changed, 2^-13 at worst.
- Where all n copies of a tensor in the engine are wrong alike, v grows by the trailing zeros of n.

Derivation: take a row with an entry that has v trailing zeros. An odd random weight is 2u + 1 with
u uniform, so that the sum e of the row is uniform over a coset of 2^(v+1) modulo 2^32. It is 0 with
a probability of at most 2^(v-31), and has v + T trailing zeros with P(T >= t) <= 2^(1-t). Given e,
each of the two sums over rows is 0 with a probability of at most 2^(v+T-31), by the same argument.
With s = 31 - v - T >= 0, both are with at most the sum over s of 2^(v-30+s) 2^(-2s) <= 2^(v-29).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from mindspeed_rl.core.boxes import Box

_COLUMN_STREAM, _ROW_STREAM = 0, 1 << 48
# Digits whose products are in memory at a time, four bytes each: few kernels on a device, and on
# CPU what its caches hold.
_DEVICE_DIGITS, _CPU_DIGITS = 1 << 24, 1 << 19


@dataclass(frozen=True, slots=True)
class RowSample:
    """The rows of a matrix whose number leaves ``phase`` when divided by ``every``.

    Of a tensor of more dimensions the last but one is meant. Vectors are always taken whole.
    """

    phase: int = 0
    every: int = 1

    def within(self, box: Box) -> range:
        """Return the rows inside a rectangle, counted from its first; of a vector one."""
        if len(box.size) == 1:
            return range(1)
        return range((self.phase - box.lo[-2]) % self.every, box.size[-2], self.every)

    def count(self, box: Box) -> int:
        """Return the number of rows inside a rectangle, over all leading dimensions."""
        return prod(box.size[:-2]) * len(self.within(box))


ALL_ROWS = RowSample()


def splitmix64(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return numbers of the splitmix64 sequence of seed 0, whose first one is 1. Local.

    Source: Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators (2014).
    """
    value = numbers * np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _stream(first: int, count: int) -> npt.NDArray[np.uint64]:
    return splitmix64(np.arange(1, count + 1, dtype=np.uint64) + np.uint64(first))


def _kept_length(needed: int) -> int:
    """Return how many weights are made at once, so that few tables are kept."""
    return 1 << max(12, (needed - 1).bit_length())


@lru_cache(maxsize=64)
def _column_table(count: int, device: torch.device) -> torch.Tensor:
    low = _stream(_COLUMN_STREAM, count).astype(np.uint32) | np.uint32(1)
    return torch.from_numpy(low.view(np.int32)).to(device)


def _column_weights(first: int, count: int, device: torch.device) -> torch.Tensor:
    """Return the weights of consecutive digits of a row: [count] int32, odd."""
    return _column_table(_kept_length(first + count), device)[first : first + count]


@lru_cache(maxsize=8)
def _row_table(count: int) -> npt.NDArray[np.uint32]:
    """Return both weights of the first rows: [2, count], odd."""
    both = _stream(_ROW_STREAM, count)
    low, high = both.astype(np.uint32), (both >> np.uint64(32)).astype(np.uint32)
    return np.stack([low, high]) | np.uint32(1)


def _row_weights(box: Box, shape: tuple[int, ...], rows: RowSample) -> npt.NDArray[np.uint32]:
    """Return both weights of the rows of a rectangle: [2, rows.count(box)]."""
    inside = rows.within(box)
    taken = slice(inside.start, inside.stop, inside.step)
    if len(shape) == 1:
        return _row_table(_kept_length(1))[:, :1]
    if len(shape) == 2:
        lo, hi = box.lo[0], box.lo[0] + box.size[0]
        return _row_table(_kept_length(shape[0]))[:, lo:hi][:, taken]
    axes = [np.arange(lo, lo + n) for lo, n in zip(box.lo[:-1], box.size[:-1], strict=True)]
    axes[-1] = axes[-1][taken]
    numbers = np.ravel_multi_index(np.ix_(*axes), shape[:-1]).ravel()
    return _row_table(_kept_length(prod(shape[:-1])))[:, numbers]


def sum_rows(
    values: torch.Tensor,
    box: Box,
    dtype: torch.dtype,
    out: torch.Tensor,
    rows: RowSample = ALL_ROWS,
) -> None:
    """Write the weighted sums of the rows of a rectangle, on its device. Local.

    Args:
        values: [box.size], any type; or [n, *box.size] of n matrices, the same place in each.
        box: Place of the values in the HF tensor.
        dtype: Type that the values are cast to first, in a kernel of its own where they have
            another one.
        out: [n x rows.count(box)] int32, for the sums modulo 2^32.
        rows: The rows to sum.
    """
    if values.ndim > 1:
        inside = rows.within(box)
        values = values[..., inside.start : inside.stop : inside.step, :]
    else:
        values = values[None]
    per_element = max(1, dtype.itemsize // 2)
    weights = _column_weights(box.lo[-1] * per_element, box.size[-1] * per_element, values.device)
    _sum_parts(values, dtype, weights, out)


def _sum_parts(
    values: torch.Tensor, dtype: torch.dtype, weights: torch.Tensor, out: torch.Tensor
) -> None:
    """Write the weighted sums of rows, of as many at a time as there may be products in memory."""
    lines = prod(values.shape[1:-1])
    limit = _CPU_DIGITS if values.device.type == "cpu" else _DEVICE_DIGITS
    if values.ndim > 2 and lines * len(weights) > limit:
        for one, sums in zip(values, torch.split(out, lines), strict=True):
            _sum_parts(one, dtype, weights, sums)
        return
    step = max(1, limit // max(1, lines * len(weights)))
    for first in range(0, len(values), step):
        part = values[first : first + step].to(dtype)
        _sum_digits(_digits(part), weights, out[first * lines : (first + step) * lines])


def _is_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


def _digits(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of values as integers of at most 16 bits, in the order of memory."""
    if values.element_size() > 2 and values.stride(-1) != 1:
        values = values.clone(memory_format=torch.contiguous_format)
    return values.view(torch.int8 if values.element_size() == 1 else torch.int16)


@lru_cache(maxsize=1)
def _wide(count: int) -> torch.Tensor:
    """Return memory for widened digits on CPU; new memory costs as much as the work in it."""
    return torch.empty(count, dtype=torch.int32)


def _sum_digits(digits: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """Write the weighted sum along the last dimension, in row-major order: two kernels."""
    if _is_cpu(digits.device):
        # The CPU's product casts in a kernel of its own; this way the product needs none.
        wide = _wide(max(digits.numel(), _CPU_DIGITS))[: digits.numel()]
        wide.view(digits.shape).copy_(digits)
        torch.mm(weights[None], wide.view(-1, len(weights)).t(), out=out[None])
    else:
        torch.sum(digits * weights, -1, dtype=torch.int32, out=out.view(digits.shape[:-1]))


def fold_rows(
    sums: npt.NDArray[np.uint32], box: Box, shape: tuple[int, ...], rows: RowSample = ALL_ROWS
) -> npt.NDArray[np.uint32]:
    """Return what the sums of a rectangle's rows add to the checksum of its tensor. Local.

    Args:
        sums: [rows.count(box)]: what :func:`sum_rows` wrote; [n, rows.count(box)] of n tensors.
        box: Place of the rectangle.
        shape: Shape of the whole HF tensor.
        rows: The rows that were summed.

    Returns:
        [2], or [n, 2], modulo 2^32.
    """
    found: npt.NDArray[np.uint32] = sums @ _row_weights(box, shape, rows).T
    return found


def box_checksum(
    values: torch.Tensor,
    box: Box,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    rows: RowSample = ALL_ROWS,
) -> npt.NDArray[np.uint32]:
    """Return what one rectangle adds to the checksum of its tensor: both steps. Local.

    Returns:
        [2], modulo 2^32.
    """
    sums = torch.empty(rows.count(box), dtype=torch.int32, device=values.device)
    sum_rows(values, box, dtype, sums, rows)
    return fold_rows(sums.cpu().numpy().view(np.uint32), box, shape, rows)


@cache
def check_arithmetic(device: torch.device) -> None:
    """Compare the sums of short and long rows on a device with exact integers, once. Local.

    Integers of 32 bits have to wrap around, which no documentation of a device promises; long rows
    may be summed in parts by another kernel than short ones.

    Raises:
        RuntimeError: They differ.
    """
    for rows, columns in ((5, 67), (1, 1 << 16)):
        bits = (np.arange(1, rows * columns + 1) * 40503 % 65536).astype(np.uint16).view(np.int16)
        bits = bits.reshape(rows, columns)
        weights = _column_weights(0, columns, torch.device("cpu")).numpy()
        expected = ((bits.astype(np.int64) * weights).sum(1) % 2**32).tolist()
        found = torch.empty(rows, dtype=torch.int32, device=device)
        values = torch.from_numpy(bits).view(torch.bfloat16).to(device)
        sum_rows(values, Box.whole((rows, columns)), torch.bfloat16, found)
        sums = (found.cpu().to(torch.int64) % 2**32).tolist()
        if sums != expected:
            raise RuntimeError(
                f"the weighted sums of rows of {columns} elements are {sums} on {device} and "
                f"should be {expected}: its products or sums of 32-bit integers are not modulo "
                "2^32, so no weights can be proven equal there"
            )
