"""Digests do not depend on the cut, and say how far two tensors are apart."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mindspeed_rl.core.boxes import Box
from mindspeed_rl.replay import digests
from mindspeed_rl.replay.digests import box_digest, norm, relative_difference, rows_digests


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(37,), (24, 36), (5, 6, 7)])
def test_the_parts_of_a_tensor_add_up_to_its_digest(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = random(*shape)
    expected = box_digest(whole, Box.whole(shape))
    assert norm(expected) == pytest.approx(float(whole.norm()), rel=1e-12)
    for dim in range(len(shape)):
        cut = shape[dim] // 3
        boxes = [
            Box.whole(shape).with_dim(dim, 0, cut),
            Box.whole(shape).with_dim(dim, cut, shape[dim] - cut),
        ]
        found = sum(box_digest(whole[box.slices], box) for box in boxes)
        assert np.allclose(found, expected, rtol=1e-12, atol=1e-12)
    monkeypatch.setattr(digests, "_CHUNK_ELEMENTS", 10)
    assert np.allclose(box_digest(whole, Box.whole(shape)), expected, rtol=1e-12, atol=1e-12)


def test_a_digest_knows_the_places_of_elements() -> None:
    whole = random(24, 36)
    swapped = whole.clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    box = Box.whole((24, 36))
    found = relative_difference(box_digest(swapped, box), box_digest(whole, box))
    assert 0.3 < found / float((swapped - whole).norm() / whole.norm()) < 3.0


@pytest.mark.parametrize("size", [1e-10, 1e-5, 1e-2, 1.0])
def test_the_distance_of_two_tensors_is_estimated(size: float) -> None:
    """Over many pairs; one estimate is of so many projections that it is right to a factor."""
    box, ratios = Box.whole((40, 30)), []
    for seed in range(20):
        a, change = random(40, 30, seed=2 * seed), size * random(40, 30, seed=2 * seed + 1)
        found = relative_difference(box_digest(a + change, box), box_digest(a, box))
        ratios.append(found / float(change.norm() / a.norm()))
    assert 0.75 < sum(ratios) / len(ratios) < 1.25 and min(ratios) > 0.3 and max(ratios) < 2.5


def test_equal_means_equal_bits_and_nan_equals_nan() -> None:
    box = Box.whole((40, 30))
    a = random(40, 30).float()
    b = a.clone()
    b[7, 9] = torch.nextafter(b[7, 9], torch.tensor(math.inf))
    one, other = box_digest(a, box), box_digest(b, box)
    assert relative_difference(one, one) == 0.0 < relative_difference(one, other) < 1e-6
    a[0, 0] = math.nan
    nan = box_digest(a, box)
    assert relative_difference(nan, nan) == 0.0 and relative_difference(one, nan) == math.inf


def test_rows_count_for_their_sequence_wherever_they_lie() -> None:
    """Packed in another order, with padding, and split over two ranks."""
    rows = random(9, 16)
    owners = np.array([0, 0, 0, 1, 1, 1, 1, 2, 2])
    positions = np.array([0, 1, 2, 0, 1, 2, 3, 0, 1])
    expected = rows_digests(rows, owners, positions, 3)
    assert np.allclose(
        np.sqrt(expected[:, 0]), [rows[a:b].norm() for a, b in ((0, 3), (3, 7), (7, 9))]
    )
    order = np.array([8, 3, 4, 0, 7, 6, 5, 2, 1])
    padded = torch.cat([rows[order], torch.full((1, 16), math.nan, dtype=torch.float64)])
    owners, positions = np.append(owners[order], -1), np.append(positions[order], 0)
    halves = [
        rows_digests(padded[part], owners[part], positions[part], 3)
        for part in (slice(0, 4), slice(4, 10))
    ]
    assert np.allclose(sum(halves), expected, rtol=1e-12, atol=1e-12)
    swapped = positions.copy()
    swapped[[3, 7]] = swapped[[7, 3]]
    assert not np.allclose(rows_digests(padded, owners, swapped, 3)[0], expected[0])
    assert np.array_equal(rows_digests(padded[9:], owners[9:], positions[9:], 3), np.zeros((3, 9)))
