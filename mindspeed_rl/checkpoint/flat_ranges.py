"""Finds the boxes of a tensor whose elements lie in a range of positions. Pure.

The distributed optimizer cuts its parameters, one after the other and flat, into a range for each
data-parallel rank. Checkpoints hold boxes of tensors, so that any layout can read them. A range of
a matrix is at most three boxes: the end of a row, whole rows, and the beginning of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FlatBox:
    """A part of a tensor: the index of its first element, and its size, along every axis."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def position(self, strides: Sequence[int]) -> int:
        """Return how far its first element lies behind that of the tensor."""
        return sum(first * stride for first, stride in zip(self.offsets, strides, strict=True))


def boxes(sizes: Sequence[int], strides: Sequence[int], low: int, high: int) -> Iterator[FlatBox]:
    """Yield disjoint boxes with all elements whose position is in ``[low, high)``.

    Args:
        sizes: Shape of a tensor.
        strides: Distance of neighbours along every axis; no two elements share a position. Axes may
            stand in any order, as in a transposed view.
        low: First position, counted from the first element of the tensor; may be negative.
        high: End of the positions.
    """
    # The axis with the widest steps comes first; those of one element do not matter.
    axes = sorted((a for a in range(len(sizes)) if sizes[a] != 1), key=lambda a: -strides[a])
    for found in _boxes([sizes[a] for a in axes], [strides[a] for a in axes], low, high):
        offsets, extents = [0] * len(sizes), [1] * len(sizes)
        for axis, offset, extent in zip(axes, found.offsets, found.sizes, strict=True):
            offsets[axis], extents[axis] = offset, extent
        yield FlatBox(tuple(offsets), tuple(extents))


def _boxes(sizes: Sequence[int], strides: Sequence[int], low: int, high: int) -> Iterator[FlatBox]:
    """Yield the boxes of a tensor whose strides decrease, in the order of their positions."""
    end = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if 0 in sizes or low >= min(high, end) or high <= 0:
        return
    if low <= 0 and high >= end:
        yield FlatBox((0,) * len(sizes), tuple(sizes))
        return
    size, stride = sizes[0], strides[0]
    extent = end - (size - 1) * stride  # of what lies at one index of the first axis
    assert extent <= stride, f"elements of {sizes} with strides {strides} share positions"
    first = max(0, -(-low // stride))
    last = max(first, min(size, (high - extent) // stride + 1))  # whole ones: [first, last)
    start, stop = max(0, low // stride), min(size, -(-high // stride))
    for index in range(start, min(first, stop)):
        yield from _at(index, sizes, strides, low, high)
    if first < last:
        rest = tuple(sizes[1:])
        yield FlatBox((first, *(0 for _ in rest)), (last - first, *rest))
    for index in range(max(last, start), stop):
        yield from _at(index, sizes, strides, low, high)


def _at(
    index: int, sizes: Sequence[int], strides: Sequence[int], low: int, high: int
) -> Iterator[FlatBox]:
    """Yield the boxes at one index of the first axis."""
    start = index * strides[0]
    for found in _boxes(sizes[1:], strides[1:], low - start, high - start):
        yield FlatBox((index, *found.offsets), (1, *found.sizes))
