"""Reads the whole tensors of a checkpoint from its files, without megatron-core."""

from __future__ import annotations

import io
import re
from pathlib import Path

import torch

from mindspeed_rl.checkpoint.metadata_files import read_index


def whole_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Put every tensor together from its parts; what no part holds is NaN."""
    index = read_index(folder / ".metadata")
    found = {
        name: torch.full(entry.size, float("nan"), dtype=entry.properties.dtype)
        for name, entry in index.state_dict_metadata.items()
        if hasattr(entry, "chunks")
    }
    for place, info in index.storage_data.items():
        if place.fqn in found:
            with (folder / info.relative_path).open("rb") as file:
                file.seek(info.offset)
                archive = io.BytesIO(file.read(info.length))
            part = torch.load(archive, weights_only=True)
            box = tuple(slice(o, o + n) for o, n in zip(place.offset, part.shape, strict=True))
            found[place.fqn][box] = part
    return found


def differing(first: Path, second: Path) -> list[str]:
    """Name the tensors of two checkpoints that differ in a bit; padding may be longer in one.

    Which of a model's optimizers has a tensor, which its name begins with, may differ.
    """
    one, other = (
        {re.sub(r"^chained_\d+\.", "", name): tensor for name, tensor in whole_tensors(f).items()}
        for f in (first, second)
    )
    wrong = sorted(one.keys() ^ other.keys())
    for name in one.keys() & other.keys():
        shape = map(min, one[name].shape, other[name].shape)
        box = tuple(slice(0, size) for size in shape)
        if not torch.equal(one[name][box], other[name][box]):
            wrong.append(name)
    return wrong
