"""Rectangles of tensors in units of elements, and views of parameters that they lie in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

Shape = tuple[int, ...]

# A dimension of this size, cut into the usual number of slices, has slices that differ in size by
# a few percent only.
_LONG = 512


@dataclass(frozen=True, slots=True)
class Box:
    """A half-open rectangle: element ``i`` is inside when ``lo <= i < lo + size`` in every dim."""

    lo: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """The rectangle that covers a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def num_elements(self) -> int:
        return prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index that selects the rectangle in its tensor."""
        return tuple(slice(lo, lo + size) for lo, size in zip(self.lo, self.size, strict=True))

    def with_dim(self, dim: int, lo: int, size: int) -> Box:
        """A copy of the rectangle with another start and size in one dimension."""
        return Box(
            (*self.lo[:dim], lo, *self.lo[dim + 1 :]),
            (*self.size[:dim], size, *self.size[dim + 1 :]),
        )

    def intersect(self, other: Box) -> Box | None:
        """The common part of two rectangles, or ``None`` when they are disjoint."""
        lo = tuple(max(a, b) for a, b in zip(self.lo, other.lo, strict=True))
        hi = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.lo, self.size, other.lo, other.size, strict=True)
        )
        if any(h <= low for low, h in zip(lo, hi, strict=True)):
            return None
        return Box(lo, tuple(h - low for low, h in zip(lo, hi, strict=True)))

    def slice(self, index: int, count: int) -> Box:
        """One of ``count`` consecutive slices along :attr:`sliced_dim`; it may be empty.

        Rectangles of equal size are sliced alike, wherever they lie.
        """
        dim, first, size = self.span(index, count)
        return self.with_dim(dim, self.lo[dim] + first, size)

    @property
    def sliced_dim(self) -> int:
        """The dimension that slices cut: the first where it is long, else the longest.

        A slice of whole rows is one contiguous run of memory.
        """
        return 0 if self.size[0] >= _LONG else self.size.index(max(self.size))

    def span(self, index: int, count: int) -> tuple[int, int, int]:
        """The dimension that :meth:`slice` cuts, and the offset and length of the slice in it."""
        dim = self.sliced_dim
        size = self.size[dim]
        first = size * index // count
        return dim, first, size * (index + 1) // count - first

    def moved(self, origin: Box, target: Box) -> Box:
        """The rectangle at the offset inside ``target`` that it has inside ``origin``."""
        lo = tuple(t + a - o for t, a, o in zip(target.lo, self.lo, origin.lo, strict=True))
        return Box(lo, self.size)


def _without(box: Box, hole: Box) -> Iterator[Box]:
    """Yield disjoint rectangles that cover ``box`` but not ``hole``."""
    common = box.intersect(hole)
    if common is None:
        yield box
        return
    rest = box
    for dim in range(len(box.lo)):
        lo, end = rest.lo[dim], rest.lo[dim] + rest.size[dim]
        inner_lo, inner_end = common.lo[dim], common.lo[dim] + common.size[dim]
        if lo < inner_lo:
            yield rest.with_dim(dim, lo, inner_lo - lo)
        if inner_end < end:
            yield rest.with_dim(dim, inner_end, end - inner_end)
        rest = rest.with_dim(dim, inner_lo, inner_end - inner_lo)


@lru_cache(maxsize=1 << 16)
def missing_elements(wanted: tuple[Box, ...], present: tuple[Box, ...]) -> int:
    """Count elements in the union of ``wanted`` that no rectangle of ``present`` holds."""
    holes, count = list(present), 0
    for box in wanted:
        parts = [box]
        for hole in holes:
            parts = [rest for part in parts for rest in _without(part, hole)]
        count += sum(part.num_elements for part in parts)
        holes.append(box)
    return count


@dataclass(frozen=True, slots=True)
class ParamView:
    """The view of a stored parameter that the coordinates of a rectangle refer to.

    Attributes:
        index: Position in the leading dimensions, e.g. the number of an expert in a stack.
        transposed: Whether the stored matrix has its last two dimensions swapped.
    """

    index: tuple[int, ...] = ()
    transposed: bool = False

    def of(self, param: Any) -> Any:
        """The view of a tensor; it shares the tensor's memory."""
        shown = param[self.index] if self.index else param
        return shown.swapaxes(-1, -2) if self.transposed else shown

    def shifted(self, places: int) -> ParamView:
        """The view at another position of the last index."""
        *outer, last = self.index
        return ParamView((*outer, last + places), self.transposed)

    def of_run(self, param: Any, count: int) -> Any:
        """The views at ``count`` positions from the last index on, stacked in the first dimension.

        It shares the tensor's memory.
        """
        *outer, first = self.index
        shown = param[(*outer, slice(first, first + count))]
        return shown.swapaxes(-1, -2) if self.transposed else shown

    def stored_box(self, box: Box) -> Box:
        """The rectangle of the stored parameter that a rectangle of the view covers."""
        lo, size = self._swapped(box.lo), self._swapped(box.size)
        return Box((*self.index, *lo), (*(1 for _ in self.index), *size))

    def shown_box(self, box: Box) -> Box:
        """The rectangle of the view that a rectangle of the stored parameter covers."""
        depth = len(self.index)
        return Box(self._swapped(box.lo[depth:]), self._swapped(box.size[depth:]))

    def _swapped(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        return (*numbers[:-2], numbers[-1], numbers[-2]) if self.transposed else numbers


PLAIN = ParamView()
