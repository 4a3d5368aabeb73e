"""Rectangles against sets of element positions."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl.core.boxes import Box

Position = tuple[int, ...]


@st.composite
def boxes(draw: st.DrawFn, num_dims: int = 2) -> Box:
    """Small, non-empty."""
    lo = [draw(st.integers(0, 6)) for _ in range(num_dims)]
    return Box(tuple(lo), tuple(draw(st.integers(1, 5)) for _ in range(num_dims)))


def positions(box: Box) -> set[Position]:
    sides = [range(lo, lo + size) for lo, size in zip(box.lo, box.size, strict=True)]
    return set(product(*sides))


@given(boxes(), boxes())
@settings(deadline=None)
def test_intersection_is_that_of_the_sets(a: Box, b: Box) -> None:
    common = a.intersect(b)
    assert (set() if common is None else positions(common)) == positions(a) & positions(b)
    assert common == b.intersect(a)


@given(boxes(), boxes())
@settings(deadline=None)
def test_moving_keeps_the_offset(inner: Box, target: Box) -> None:
    origin = Box((1, 2), (20, 20))
    moved = inner.moved(origin, target)
    assert moved.size == inner.size
    shifts = {
        tuple(t - m for t, m in zip(target.lo, moved.lo, strict=True)),
        tuple(o - i for o, i in zip(origin.lo, inner.lo, strict=True)),
    }
    assert len(shifts) == 1
    assert moved.moved(target, origin) == inner


@given(boxes(num_dims=3))
@settings(deadline=None)
def test_slices_select_the_positions(box: Box) -> None:
    shape = (12, 12, 12)
    hit = np.zeros(shape, bool)
    hit[box.slices] = True
    assert {tuple(map(int, p)) for p in np.argwhere(hit)} == positions(box)
    assert box.num_elements == int(hit.sum())


def test_whole_and_with_dim() -> None:
    whole = Box.whole((4, 6))
    assert whole == Box((0, 0), (4, 6))
    assert whole.with_dim(0, 1, 2) == Box((1, 0), (2, 6))
    assert whole.with_dim(1, 3, 3) == Box((0, 3), (4, 3))
