"""Digests of tensors: a few numbers by which equal tensors are equal, however they are cut.

The digest of a tensor X is ``[|X|^2, P_1, ..., P_K]`` in fp64, where ``P_k`` is the sum of the
elements of X with signs that depend on k and the place of the element in the whole tensor. Digests
are linear but for the first number, so ranks add up what their own parts give. The difference D of
two tensors has the projections ``P_k(D)``, each of mean 0 and variance ``|D|^2``: their root mean
square estimates ``|D|``. It is 0 for D = 0, and for no other D that is not made for it.

The sign of an element is the product of a sign per dimension: a bit of splitmix64 of the place.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from mindspeed_rl.core.boxes import Box

NUM_PROJECTIONS = 8
WIDTH = 1 + NUM_PROJECTIONS
"""Numbers of a digest."""
_CHUNK_ELEMENTS = 1 << 22


@lru_cache(maxsize=64)
def _line(dim: int, count: int) -> torch.Tensor:
    """Return the signs of the first ``count`` places of a dimension: [count, K] fp64.

    Dimensions are counted from the last one.
    """
    value = np.arange(1, count + 1, dtype=np.uint64) + np.uint64((dim + 1) << 48)
    value *= np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits = (value[:, None] >> np.arange(32, 32 + NUM_PROJECTIONS, dtype=np.uint64)) & np.uint64(1)
    return torch.from_numpy(bits.astype(np.float64) * 2.0 - 1.0)


def signs(dim: int, last: int) -> torch.Tensor:
    """Return the signs of the places 0 to ``last - 1`` of a dimension: [last, K] fp64."""
    return _line(dim, 1 << max(10, (last - 1).bit_length()))[:last]


def rows_digests(
    rows: torch.Tensor, owners: NDArray[np.int64], positions: NDArray[np.int64], count: int
) -> NDArray[np.float64]:
    """Return what rows of hidden states add to the digests of their sequences: [count, WIDTH].

    Args:
        rows: [T, h], of any floating type on any device.
        owners: [T], the sequence of each row, below ``count``; -1 for rows that do not count.
        positions: [T], the position of each row in its sequence.
        count: Number of sequences.
    """
    kept = owners >= 0
    places = torch.from_numpy(kept)
    values = rows.detach().to("cpu", torch.float64)[places]
    position = torch.from_numpy(positions[kept])
    along = signs(1, int(position.max()) + 1 if len(position) else 1)[position]
    parts = torch.cat(
        [(values * values).sum(1, keepdim=True), (values @ signs(0, rows.size(1))) * along], dim=1
    )
    found = torch.zeros(count, WIDTH, dtype=torch.float64)
    return found.index_add_(0, torch.from_numpy(owners[kept]), parts).numpy()


def box_digest(values: torch.Tensor, box: Box) -> NDArray[np.float64]:
    """Return what a rectangle adds to the digest of its tensor: [WIDTH].

    Args:
        values: [box.size], of any floating type on any device.
        box: Place of the values in the whole tensor.
    """
    total = np.zeros(WIDTH)
    whole, count = Box.whole(box.size), -(-box.num_elements // _CHUNK_ELEMENTS)
    for part in (box.slice(i, count) for i in range(count)):
        if part.num_elements:
            chunk = values[part.moved(box, whole).slices]
            total += _chunk_digest(chunk.detach().to("cpu", torch.float64), part)
    return total


def _chunk_digest(values: torch.Tensor, box: Box) -> NDArray[np.float64]:
    square = values.square().sum()
    *outer, (lo, size) = zip(box.lo, box.size, strict=True)
    projected = values @ signs(0, lo + size)[lo:]
    for dim, (first, length) in enumerate(reversed(outer), start=1):
        projected = (projected * signs(dim, first + length)[first:]).sum(-2)
    return np.concatenate([[float(square)], projected.numpy()])


def relative_difference(
    mine: NDArray[np.float64], other: NDArray[np.float64], floor: float = 0.0
) -> float:
    """Estimate ``|X - Y| / (|Y| + floor)`` from the digests of X and Y; 0 only if both are equal.

    A digest that is not finite differs infinitely from every other one.
    """
    if np.array_equal(mine, other, equal_nan=True):
        return 0.0
    if not (np.isfinite(mine).all() and np.isfinite(other).all()):
        return float("inf")
    distance = float(np.sqrt(np.mean((mine[1:] - other[1:]) ** 2)))
    # The squared norms alone may differ, where the projections of a difference are rounded away.
    distance = max(distance, abs(norm(mine) - norm(other)))
    size = norm(other) + floor
    return distance / size if size else float("inf")


def norm(digest: NDArray[np.float64]) -> float:
    """Return the Euclidean norm of the tensor of a digest."""
    return float(np.sqrt(digest[0]))
