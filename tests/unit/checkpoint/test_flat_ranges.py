"""Boxes of a tensor that lie in a range of positions, against every element looked at."""

from __future__ import annotations

import random

import torch

from mindspeed_rl.checkpoint.flat_ranges import boxes


def test_boxes_hold_every_element_of_the_range_once() -> None:
    """Views of up to four axes, with gaps and in any order of axes."""
    rng = random.Random(0)
    for _ in range(3000):
        shape = [rng.randint(1, 4) for _ in range(rng.randint(0, 4))]
        padded = [size + rng.randint(0, 2) for size in shape]
        order = rng.sample(range(len(shape)), len(shape))
        whole = torch.arange(int(torch.tensor(padded).prod())).view(padded)
        view = whole[tuple(slice(0, size) for size in shape)].permute(order)
        low = rng.randint(-5, 60)
        high = low + rng.randint(0, 60)
        found = []
        for box in boxes(view.shape, view.stride(), low, high):
            ends = zip(box.offsets, box.sizes, strict=True)
            part = view[tuple(slice(o, o + n) for o, n in ends)].flatten().tolist()
            assert part[0] == box.position(view.stride())
            found += part
        assert sorted(found) == sorted(x for x in view.flatten().tolist() if low <= x < high)


def test_a_range_of_a_matrix_is_three_boxes() -> None:
    found = [(box.offsets, box.sizes) for box in boxes((5, 4), (4, 1), 2, 13)]
    assert found == [((0, 2), (1, 2)), ((1, 0), (2, 4)), ((3, 0), (1, 1))]
