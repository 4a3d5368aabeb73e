"""The target of a conversion: every tensor with its place, before any number is read."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mindspeed_rl.convert.checkpoint_files import CheckpointLayout
from mindspeed_rl.convert.source import Source
from mindspeed_rl.core.boxes import Box, ParamView, Shape
from mindspeed_rl.weight_layouts.base import Piece, pieces_of

SAFETENSORS_TYPES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
}


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor of an output file.

    Attributes:
        name: Name in its file.
        dtype: Element type.
        shape: Shape in the coordinates of its pieces; the file may name another of the same size.
        pieces: HF rectangles that it consists of; elements outside of them are 0.
    """

    name: str
    dtype: torch.dtype
    shape: Shape
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in the file, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def fill(self, source: Source, block: Box, values: torch.Tensor) -> None:
        """Read a rectangle of the tensor from the source into ``values`` [block.size]."""
        found = [
            (piece, common)
            for piece in self.pieces
            if (common := piece.view.stored_box(piece.param_box).intersect(block)) is not None
        ]
        if sum(common.num_elements for _, common in found) < block.num_elements:
            values.zero_()  # This is the value of declared padding.
        for piece, common in found:
            place = common.moved(block, Box.whole(block.size)).slices
            view = ParamView((0,) * len(piece.view.index), piece.view.transposed)
            box = piece.view.shown_box(common).moved(piece.param_box, piece.hf_box)
            source.read(piece.hf_name, box, view.of(values[place]))


@dataclass(frozen=True)
class OutputFile:
    """A file whose bytes are all known, except those of its tensors.

    Attributes:
        path: Path relative to the directory of the target.
        tensors: Tensors of the file.
        frame: Function that makes a file with all else; it returns the first byte of each tensor.
    """

    path: str
    tensors: tuple[OutputTensor, ...]
    frame: Callable[[Path], Sequence[int]]

    @property
    def num_bytes(self) -> int:
        """Size of all tensors of the file, in bytes."""
        return sum(tensor.num_bytes for tensor in self.tensors)


@dataclass(frozen=True)
class Target:
    """All files of a checkpoint.

    Attributes:
        files: Files with tensors.
        small: Path -> bytes of all other files.
        dtypes: Element type of every HF tensor in the checkpoint.
    """

    files: tuple[OutputFile, ...]
    small: Mapping[str, bytes]
    dtypes: Mapping[str, torch.dtype]

    @property
    def num_bytes(self) -> int:
        """Size of the tensors of all files, in bytes."""
        return sum(file.num_bytes for file in self.files)


def in_files(tensors: Sequence[OutputTensor], most_bytes: int) -> list[list[OutputTensor]]:
    """Divide tensors among files of at most ``most_bytes``; a larger tensor has its own file."""
    groups: list[list[OutputTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if groups[-1] and filled + tensor.num_bytes > most_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.num_bytes
    return groups


def safetensors_file(path: str, tensors: Sequence[OutputTensor]) -> OutputFile:
    """Plan a safetensors file; its data begin at a multiple of 64 bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position, starts = 0, []
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": SAFETENSORS_TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.num_bytes],
        }
        starts.append(position)
        position += tensor.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    data = struct.pack("<Q", len(text)) + text

    def frame(place: Path) -> list[int]:
        place.write_bytes(data)
        return [len(data) + start for start in starts]

    return OutputFile(path, tuple(tensors), frame)


def params_of_rank(
    layout: CheckpointLayout, rank: int, dtypes: Mapping[str, torch.dtype]
) -> dict[str, OutputTensor]:
    """Return the parameters of a rank by local name, each of the type of its first HF tensor.

    A parameter that is only padding has the type of the embedding.
    """
    pieces: dict[str, list[Piece]] = {}
    for shard in pieces_of(layout, rank):
        pieces.setdefault(shard.piece.param, []).append(shard.piece)
    first = next(iter(layout.hf_shapes))
    found = {}
    for param, shape in layout.local_shapes(rank).items():
        mine = tuple(pieces.get(param, ()))
        dtype = dtypes[mine[0].hf_name if mine else first]
        found[param] = OutputTensor(param, dtype, shape, mine)
    return found
