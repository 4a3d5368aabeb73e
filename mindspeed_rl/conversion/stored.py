"""Tensors that lie in files: rectangles are read without reading the rest."""

from __future__ import annotations

import math
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mindspeed_rl.resharding.boxes import Box

# A rectangle that is not one run of bytes is copied out of a mapping of this size at a time.
_MAPPED_BYTES = 64 << 20


class UnreadableError(ValueError):
    """A file that is read fails; it says nothing about what was written."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A row-major tensor at an offset of a file.

    Attributes:
        path: the file.
        offset: of the first byte.
        dtype: element type.
        shape: in elements.
    """

    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def reshaped(self, shape: tuple[int, ...]) -> StoredTensor:
        """The same bytes under another shape."""
        assert math.prod(shape) == math.prod(self.shape), (self, shape)
        return StoredTensor(self.path, self.offset, self.dtype, shape)


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
        ValueError: the file is shorter than its own description.
    """
    assert tuple(target.shape) == box.size, (target.shape, box)
    if not box.num_elements:
        return
    try:
        _read_box(target, stored, box)
    except OSError as error:  # those of the target's disk mean something else
        raise UnreadableError(
            f"{stored.path}: cannot be read: {error.strerror or error}; mend its disk or copy the "
            "file again, then give the same command again"
        ) from error


def _read_box(target: torch.Tensor, stored: StoredTensor, box: Box) -> None:
    run = _run(stored.shape, box)
    descriptor = os.open(stored.path, os.O_RDONLY)
    try:
        if os.fstat(descriptor).st_size < stored.offset + stored.num_bytes:
            raise ValueError(
                f"{stored.path}: the file ends before byte {stored.offset + stored.num_bytes}, "
                "where its header says that a tensor ends; copy or download it again"
            )
        if run is None:
            _copy_mapped(descriptor, target, stored, box)
        else:
            _read_run(descriptor, target, stored, run)
    finally:
        os.close(descriptor)


def _run(shape: tuple[int, ...], box: Box) -> int | None:
    """First element of a rectangle that is one run of memory; ``None`` when it is several."""
    open_dim = next((d for d, n in enumerate(box.size) if n > 1), len(shape))
    if any(box.size[d] != shape[d] for d in range(open_dim + 1, len(shape))):
        return None
    return sum(lo * math.prod(shape[dim + 1 :]) for dim, lo in enumerate(box.lo))


def _read_run(descriptor: int, target: torch.Tensor, stored: StoredTensor, first: int) -> None:
    start = stored.offset + first * stored.dtype.itemsize
    direct = target.is_contiguous() and target.dtype == stored.dtype
    buffer = target if direct else torch.empty(target.shape, dtype=stored.dtype)
    memory, done = bytes_of(buffer), 0
    while done < len(memory):
        count = os.preadv(descriptor, [memory[done:]], start + done)
        if not count:
            raise ValueError(f"{stored.path}: the file became shorter while it was read")
        done += count
    if not direct:
        target.copy_(buffer)


def _copy_mapped(descriptor: int, target: torch.Tensor, stored: StoredTensor, box: Box) -> None:
    """Columns of a matrix: only the pages that hold them are read."""
    row_bytes = math.prod(stored.shape[1:]) * stored.dtype.itemsize
    step = max(1, _MAPPED_BYTES // max(1, row_bytes))
    for row in range(0, box.size[0], step):
        count = min(step, box.size[0] - row)
        start = stored.offset + (box.lo[0] + row) * row_bytes
        low = start - start % mmap.ALLOCATIONGRANULARITY
        end = start + count * row_bytes
        with mmap.mmap(descriptor, end - low, access=mmap.ACCESS_COPY, offset=low) as mapped:
            flat = torch.frombuffer(
                mapped, dtype=torch.uint8, offset=start - low, count=end - start
            )
            if start % stored.dtype.itemsize:
                flat = flat.clone()  # a file may keep numbers at odd addresses
            rows = flat.view(stored.dtype).view(count, *stored.shape[1:])
            inner = tuple(slice(lo, lo + n) for lo, n in zip(box.lo[1:], box.size[1:], strict=True))
            target[row : row + count].copy_(rows[(slice(None), *inner)])
            del flat, rows
