"""Hugging Face checkpoints as targets."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence

import torch

from mindspeed_rl.conversion.source import Shape
from mindspeed_rl.conversion.target import OutputTensor, Target, safetensors_file
from mindspeed_rl.models.hf_files import INDEX, SINGLE
from mindspeed_rl.resharding.boxes import Box
from mindspeed_rl.resharding.layouts.base import Piece


def plan_hf(
    shapes: Mapping[str, Shape], dtype_of: Callable[[str], torch.dtype], shard_bytes: int
) -> Target:
    """Safetensors files of at most ``shard_bytes``, a larger tensor in one of its own.

    Args:
        shapes: the tensors, in order of writing.
        dtype_of: element type of each.
        shard_bytes: see above.
    """
    dtypes = {name: dtype_of(name) for name in shapes}
    groups: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * dtypes[name].itemsize
        if groups[-1] and filled + size > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    count = len(groups)
    names = [SINGLE] if count == 1 else [
        f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)
    ]  # fmt: skip
    files = tuple(
        safetensors_file(path, [_whole(name, dtypes[name], shapes[name]) for name in group])
        for path, group in zip(names, groups, strict=True)
    )
    total = sum(math.prod(shapes[name]) * dtypes[name].itemsize for name in shapes)
    small = {} if count == 1 else {INDEX: _index(names, groups, total)}
    return Target(files, small, shapes, dtypes)


def _whole(name: str, dtype: torch.dtype, shape: Shape) -> OutputTensor:
    box = Box.whole(shape)
    return OutputTensor(name, dtype, shape, (Piece(name, box, name, box),))


def _index(names: Sequence[str], groups: Sequence[Sequence[str]], total: int) -> bytes:
    weight_map = {name: path for path, group in zip(names, groups, strict=True) for name in group}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return json.dumps(index, indent=2, sort_keys=True).encode()
