"""Random weights of a model in one file that all ranks of a host map, and the check against it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import numpy as np
import torch

from mindspeed_rl.resharding.executor import wire_dtype
from mindspeed_rl.resharding.layouts.base import Piece, ShardLayout, pieces_of

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
# clears the highest exponent bit of bfloat16, float16 and float32: no infinity, no NaN
_FINITE = 0xBFFF
_CHUNK = 1 << 24


class HfWeights:
    """All HF tensors of a layout, in the order of ``hf_shapes``.

    Args:
        layout: declares names, shapes and element types.
        dtype: of tensors without a type of their own.
        path: of the file.
    """

    def __init__(self, layout: ShardLayout, dtype: torch.dtype, path: Path) -> None:
        self._layout = layout
        self._dtypes = {n: wire_dtype(layout.dtype_of(n), dtype) for n in layout.hf_shapes}
        sizes = [prod(s) * self._dtypes[n].itemsize for n, s in layout.hf_shapes.items()]
        ends = list(itertools.accumulate(-(-size // 8) * 8 for size in sizes))
        self._starts = dict(zip(layout.hf_shapes, [0, *ends[:-1]], strict=True))
        self.num_bytes = sum(sizes)
        self._file_bytes = ends[-1]
        self._path = path

    def write(self, seed: int) -> None:
        """Fill the file with random finite numbers."""
        generator = np.random.Generator(np.random.SFC64(seed))
        with self._path.open("wb") as file:
            for start in range(0, self._file_bytes, 2 * _CHUNK):
                count = min(2 * _CHUNK, self._file_bytes - start) // 2
                bits = np.frombuffer(generator.bytes(2 * count), np.uint16) & _FINITE
                file.write(bits.tobytes())

    def map(self) -> dict[str, torch.Tensor]:
        """The tensors; their memory is the file's, shared by all ranks."""
        flat = torch.from_file(
            str(self._path), shared=True, size=self._file_bytes, dtype=torch.uint8
        )
        tensors = {}
        for name, shape in self._layout.hf_shapes.items():
            size, dtype = prod(shape) * self._dtypes[name].itemsize, self._dtypes[name]
            start = self._starts[name]
            tensors[name] = flat[start : start + size].view(dtype).view(shape)
        return tensors


def empty_params(
    layout: ShardLayout, rank: int, dtype: torch.dtype, fill: int
) -> dict[str, torch.Tensor]:
    """A rank's parameters, every element with the bit pattern ``fill``."""
    own = {s.piece.param: layout.dtype_of(s.piece.hf_name) for s in pieces_of(layout, rank)}
    params = {}
    for name, shape in layout.local_shapes(rank).items():
        kind = wire_dtype(own.get(name, ""), dtype)
        params[name] = torch.full(shape, fill, dtype=_BITS[kind.itemsize]).view(kind)
    return params


def refill(params: Mapping[str, torch.Tensor], fill: int) -> None:
    """Give every element the bit pattern ``fill``."""
    for param in params.values():
        param.view(_BITS[param.element_size()]).fill_(fill)


def shown(params: Mapping[str, torch.Tensor], piece: Piece) -> torch.Tensor:
    """Where a piece lives in a rank's parameters."""
    view: torch.Tensor = piece.view.of(params[piece.param])[piece.param_box.slices]
    return view


def load(
    layout: ShardLayout,
    rank: int,
    params: Mapping[str, torch.Tensor],
    weights: Mapping[str, torch.Tensor],
) -> None:
    """Fill a rank's parameters by slicing the HF tensors."""
    for shard in pieces_of(layout, rank):
        piece = shard.piece
        shown(params, piece).copy_(weights[piece.hf_name][piece.hf_box.slices])


def differing(
    layout: ShardLayout,
    rank: int,
    params: Mapping[str, torch.Tensor],
    weights: Mapping[str, torch.Tensor],
) -> Sequence[str]:
    """Parameters of a rank that are not bit-equal to the slices of the HF tensors."""
    wrong = []
    for shard in pieces_of(layout, rank):
        piece = shard.piece
        found, expected = shown(params, piece), weights[piece.hf_name][piece.hf_box.slices]
        bits = _BITS[found.element_size()]
        if not torch.equal(found.view(bits), expected.view(bits)):
            wrong.append(f"{piece.param} ({piece.hf_name})")
    return wrong
