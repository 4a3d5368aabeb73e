"""Tensors that lie in files: rectangles are read without reading the rest."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mindspeed_rl.core.boxes import Box
from mindspeed_rl.core.errors import UsageError

# A rectangle that is not one run of bytes is cut out of whole rows of this size at a time.
_ROWS_BYTES = 32 << 20


class UnreadableError(ValueError):
    """A file that is read fails; it says nothing about what was written."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A row-major tensor: its file, offset of its first byte, element type and shape."""

    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def reshaped(self, shape: tuple[int, ...]) -> StoredTensor:
        """The same bytes under another shape."""
        assert math.prod(shape) == math.prod(self.shape), (self, shape)
        return replace(self, shape=shape)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    assert tensor.is_contiguous()
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def read_box(target: torch.Tensor, stored: StoredTensor, box: Box) -> None:
    """Copy a rectangle of a stored tensor into ``target``, cast to its type. Local.

    Args:
        target: [box.size]; may be a view.
        stored: where the numbers are.
        box: which of them.

    Raises:
        UnreadableError: the file system says no.
        UsageError: the file is shorter than its own description.
    """
    assert tuple(target.shape) == box.size, (target.shape, box)
    if not box.num_elements:
        return
    try:
        descriptor = os.open(stored.path, os.O_RDONLY)
        try:
            _read(descriptor, target, stored, box)
        finally:
            os.close(descriptor)
    except OSError as error:  # those of the target's disk mean something else
        raise UnreadableError(
            f"{stored.path}: cannot be read: {error.strerror or error}; mend its disk or copy the "
            "file again, then give the same command again"
        ) from error


def _read(descriptor: int, target: torch.Tensor, stored: StoredTensor, box: Box) -> None:
    """Whole rows of the first axis that the rectangle has several of, in blocks."""
    offset, shape, lo = stored.offset, stored.shape, box.lo
    while shape and target.shape[0] == 1:
        offset += lo[0] * math.prod(shape[1:]) * stored.dtype.itemsize
        target, shape, lo = target[0], shape[1:], lo[1:]
    if not shape:
        target, shape, lo = target.unsqueeze(0), (1,), (0,)
    columns = tuple(slice(at, at + n) for at, n in zip(lo[1:], target.shape[1:], strict=True))
    direct = (
        target.is_contiguous() and target.dtype == stored.dtype and target.shape[1:] == shape[1:]
    )
    row_bytes = math.prod(shape[1:]) * stored.dtype.itemsize
    step = max(1, _ROWS_BYTES // row_bytes)
    for row in range(0, target.shape[0], step):
        part = target[row : row + step]
        rows = part if direct else torch.empty((len(part), *shape[1:]), dtype=stored.dtype)
        _read_at(descriptor, bytes_of(rows), offset + (lo[0] + row) * row_bytes, stored.path)
        if not direct:
            part.copy_(rows[(slice(None), *columns)])


def _read_at(descriptor: int, memory: memoryview, position: int, path: Path) -> None:
    while memory:
        count = os.preadv(descriptor, [memory], position)
        if not count:
            raise UsageError(
                f"{path}: the file ends at byte {position}, within a tensor that its header "
                "describes; copy or download it again"
            )
        memory, position = memory[count:], position + count
