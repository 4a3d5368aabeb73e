"""A checkpoint as a source, which can read any rectangle of any Hugging Face tensor.

Rectangles are read without reading the rest of a file, whatever the format of the files is.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mindspeed_rl.core.boxes import PLAIN, Box, ParamView, Shape
from mindspeed_rl.core.errors import UsageError

# Approximate size of the blocks in which tensors are processed and rows of files are read, so that
# memory does not grow with the model.
BLOCK_BYTES = 32 << 20


class UnreadableError(Exception):
    """Reading a source file failed, which says nothing about the files that were written."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A row-major tensor: its file, offset of its first byte, element type and shape."""

    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def reshaped(self, shape: tuple[int, ...]) -> StoredTensor:
        """Return the same bytes with another shape."""
        assert math.prod(shape) == math.prod(self.shape), (self, shape)
        return replace(self, shape=shape)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    assert tensor.is_contiguous()
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def read_box(target: torch.Tensor, stored: StoredTensor, box: Box) -> None:
    """Copy a rectangle of a stored tensor into ``target``, cast to its type. Local.

    Args:
        target: [box.size]; may be a view.
        stored: Tensor in the file.
        box: Rectangle of the stored tensor.

    Raises:
        UnreadableError: The file system reports an error.
        UsageError: The file is shorter than its own description.
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
    except OSError as error:  # Errors of the target's disk are explained elsewhere.
        raise UnreadableError(
            f"{stored.path}: cannot be read: {error.strerror or error}; repair its disk or copy "
            "the file again, then give the same command again"
        ) from error


def _read(descriptor: int, target: torch.Tensor, stored: StoredTensor, box: Box) -> None:
    """Read whole rows, in blocks, along the first axis where the rectangle has several rows."""
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
    step = max(1, BLOCK_BYTES // row_bytes)
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


@dataclass(frozen=True, slots=True)
class Scales:
    """Factors of a block-quantised matrix, one for each ``block`` of it."""

    stored: StoredTensor
    block: tuple[int, int]


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A rectangle of an HF tensor in a file.

    Attributes:
        hf_box: Rectangle of the HF tensor.
        stored: Tensor in the file.
        param_box: Rectangle of what ``view`` shows of ``stored``.
        view: View of the stored tensor.
        scales: Factors of a quantised matrix, which is read as bfloat16.
    """

    hf_box: Box
    stored: StoredTensor
    param_box: Box
    view: ParamView = PLAIN
    scales: Scales | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the part as it is read."""
        return torch.bfloat16 if self.scales else self.stored.dtype

    def read(self, target: torch.Tensor, box: Box) -> None:
        """Copy a rectangle of this part, in coordinates of the HF tensor, into ``target``."""
        inside = box.moved(self.hf_box, self.param_box)
        if self.scales is not None:
            _dequantise(target, self.stored, self.scales, inside)
            return
        stored_box = self.view.stored_box(inside)
        shown = target.swapaxes(-1, -2) if self.view.transposed else target
        for _ in self.view.index:
            shown = shown.unsqueeze(0)
        read_box(shown, self.stored, stored_box)


def _dequantise(target: torch.Tensor, stored: StoredTensor, scales: Scales, box: Box) -> None:
    """Multiply numbers by the factor of their block, in fp32, and round to bfloat16.

    It works on one row of blocks at a time, to keep little more than the stored numbers in memory.

    Source: ``weight_dequant`` of DeepSeek-V3's ``inference/kernel.py``.
    """
    numbers = torch.empty(box.size, dtype=stored.dtype)
    read_box(numbers, stored, box)
    rows, columns = scales.block
    first = tuple(lo // block for lo, block in zip(box.lo, scales.block, strict=True))
    last = tuple(
        -(-(lo + size) // block)
        for lo, size, block in zip(box.lo, box.size, scales.block, strict=True)
    )
    needed = Box(first, tuple(b - a for a, b in zip(first, last, strict=True)))
    factors = torch.empty(needed.size, dtype=torch.float32)
    read_box(factors, scales.stored, needed)
    factors = factors.repeat_interleave(columns, 1).narrow(1, box.lo[1] % columns, box.size[1])
    start = 0
    for factor in factors:
        end = min(start + rows - (box.lo[0] + start) % rows, box.size[0])
        target[start:end] = numbers[start:end].float().mul_(factor).to(torch.bfloat16)
        start = end


@dataclass(frozen=True)
class Source:
    """The tensors of a checkpoint.

    Attributes:
        place: Directory, for messages.
        kind: Description of the format.
        shapes: Whole shape of every HF tensor.
        parts_of: Function that returns the parts of a tensor, which hold each element once; it is
            called for every block.
        files: All files that are read.
        iteration: Number of training steps; 1 where the checkpoint does not tell.
    """

    place: str
    kind: str
    shapes: Mapping[str, Shape]
    parts_of: Callable[[str], tuple[TensorPart, ...]]
    files: tuple[Path, ...]
    iteration: int = 1

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the element type of a tensor as it is read."""
        kinds = {part.dtype for part in self.parts_of(name)}
        if len(kinds) > 1:
            raise UsageError(f"{self.place}: {name} has parts of types {sorted(map(str, kinds))}")
        return kinds.pop()

    def read(self, name: str, box: Box, target: torch.Tensor) -> None:
        """Copy a rectangle of an HF tensor into ``target`` [box.size], cast to its type."""
        whole = len(parts := self.parts_of(name)) == 1 and parts[0].hf_box == box
        for part in parts:
            common = box if whole else part.hf_box.intersect(box)
            if common is not None:
                slices = common.moved(box, Box.whole(box.size)).slices
                part.read(target[slices], common)


def row_blocks(shape: Shape, item_bytes: int) -> Iterator[Box]:
    """Yield blocks of whole rows of a tensor; an empty tensor has none."""
    whole = Box.whole(shape)
    if not whole.num_elements:
        return
    if not shape:
        yield whole
        return
    step = max(1, BLOCK_BYTES // (math.prod(shape[1:]) * item_bytes))
    for row in range(0, shape[0], step):
        yield whole.with_dim(0, row, min(step, shape[0] - row))


def same_bits(
    a: Source, name: str, b: Source, dtype: torch.dtype, other_name: str | None = None
) -> bool:
    """Tell whether two HF tensors, by default of one name, agree in every bit as ``dtype``."""
    for box in row_blocks(a.shapes[name], dtype.itemsize):
        left, right = torch.empty(box.size, dtype=dtype), torch.empty(box.size, dtype=dtype)
        a.read(name, box, left)
        b.read(other_name or name, box, right)
        if not torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (left, right))):
            return False
    return True
