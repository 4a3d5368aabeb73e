"""Checkpoints in megatron-core's distributed format (``torch_dist``) as sources.

The format keeps every parameter in coordinates of the whole model, cut into chunks that need not be
those of any layout. Chunks are archives of ``torch.save`` behind one another in ``*.distcp`` files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mindspeed_rl.checkpoint.resume import RECORD
from mindspeed_rl.convert.source import Source, TensorPart
from mindspeed_rl.convert.stored import StoredTensor
from mindspeed_rl.convert.torch_files import read_torch_file, stored_tensor
from mindspeed_rl.core.boxes import Box, ParamView
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.models.file_names import told_from
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.weights.layouts.base import Shard
from mindspeed_rl.weights.layouts.checkpoint_files import whole_layout

COMMON, INDEX, FORMAT = "common.pt", ".metadata", "metadata.json"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.*)")


def is_distributed(folder: Path) -> bool:
    """Whether a folder holds a distributed checkpoint."""
    return (folder / FORMAT).is_file() and (folder / INDEX).is_file()


def key_of(param: str, stacked: bool) -> tuple[str, tuple[int, ...]]:
    """Key of a whole parameter, and its position among those that share the key.

    Args:
        param: name in the layout of one rank, one module per expert.
        stacked: whether all layers share a key.
    """
    match = _LAYER.fullmatch(param)
    if match is None:
        return param, ()
    layer, tail = int(match[1]), match[2]
    position: tuple[int, ...] = ()
    if expert := _EXPERT.fullmatch(tail):
        tail, position = f"mlp.experts.experts.{expert[2]}", (int(expert[1]),)
    if stacked:
        return f"decoder.layers.{tail}", (layer, *position)
    return f"decoder.layers.{layer}.{tail}", position


def open_distributed(folder: Path, spec: ModelSpec) -> Source:
    """The weights of a distributed checkpoint; optimizer and random states are left alone.

    Raises:
        UsageError: another format, unreadable files, or weights that the model does not have.
    """
    kind = json.loads((folder / FORMAT).read_text(encoding="utf-8")).get("sharded_backend")
    if kind != "torch_dist":
        raise UsageError(
            f"{folder}: distributed checkpoint of format {kind!r}; allowed: torch_dist. Save it "
            "with --ckpt-format torch_dist, or convert it with Megatron's own tool"
        )
    index = FileSystemReader(folder).read_metadata()
    keys = index.state_dict_metadata
    stacked = any(key.startswith("decoder.layers.self_attention.") for key in keys)
    names = replace(told_from(keys, spec), experts="single", mtp=False)
    embedding = keys.get("embedding.word_embeddings.weight")
    if not isinstance(embedding, TensorStorageMetadata):
        raise UsageError(f"{folder}: no embedding in it; is it the checkpoint of a language model?")
    layout = whole_layout(spec, names, int(embedding.size[0]))
    shards_of_names = {name: layout.shards(name) for name in layout.hf_shapes}
    lacking = sorted(
        {
            key
            for shards in shards_of_names.values()
            for shard in shards
            if (key := key_of(shard.piece.param, stacked)[0]) not in keys
        }
    )
    if lacking:
        raise UsageError(
            f"{folder}: {lacking[0]} and {len(lacking) - 1} more keys are missing, which "
            "config.json implies; give the config.json of this model (--hf-cfg-dir)"
        )

    places = _places(index)

    @cache
    def chunks(key: str) -> tuple[tuple[Box, StoredTensor], ...]:
        return tuple(
            (box, _stored(folder / info.relative_path, key, box, info)) for box, info in places[key]
        )

    def parts_of(name: str) -> tuple[TensorPart, ...]:
        found: list[TensorPart] = []
        for shard in shards_of_names[name]:
            if not shard.is_replica:
                key, position = key_of(shard.piece.param, stacked)
                found += _parts(shard, position, chunks(key))
        return tuple(found)

    paths = tuple(sorted(folder.glob("*.distcp")))
    iteration = _iteration(folder)
    shapes = dict(layout.hf_shapes)
    return Source(str(folder), "torch_dist", shapes, parts_of, (folder / INDEX, *paths), iteration)


def _places(index: Any) -> dict[str, list[tuple[Box, Any]]]:
    """Key -> rectangles in coordinates of the whole, and which part of which file holds each."""
    sizes = {
        (key, tuple(chunk.offsets)): tuple(chunk.sizes)
        for key, entry in index.state_dict_metadata.items()
        for chunk in getattr(entry, "chunks", ())
    }
    places: dict[str, list[tuple[Box, Any]]] = {}
    for place, info in index.storage_data.items():
        if place.offset is not None:  # else it is no tensor
            offsets = tuple(place.offset)
            box = Box(offsets, sizes[place.fqn, offsets])
            places.setdefault(place.fqn, []).append((box, info))
    return places


def _stored(path: Path, key: str, box: Box, info: Any) -> StoredTensor:
    tensor = read_torch_file(path, info.offset, info.length)
    if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != box.size:
        raise UsageError(f"{path}: {key} is not the tensor that {INDEX} says; copy it again")
    return stored_tensor(path, tensor, info.offset)


def _parts(
    shard: Shard, position: tuple[int, ...], chunks: tuple[tuple[Box, StoredTensor], ...]
) -> Iterator[TensorPart]:
    """What the chunks hold of a piece of a whole parameter."""
    piece, depth = shard.piece, len(position)
    for box, stored in chunks:
        if any(not lo <= p < lo + n for p, lo, n in zip(position, box.lo, box.size, strict=False)):
            continue
        inner = Box(box.lo[depth:], box.size[depth:])
        common = piece.param_box.intersect(inner)
        if common is None:
            continue
        hf_box = common.moved(piece.param_box, piece.hf_box)
        view = ParamView(tuple(p - lo for p, lo in zip(position, box.lo, strict=False)))
        yield TensorPart(hf_box, stored, common.moved(inner, Box.whole(inner.size)), view)


def _iteration(folder: Path) -> int:
    if (folder / RECORD).is_file():
        return int(json.loads((folder / RECORD).read_text(encoding="utf-8"))["step"])
    common = read_torch_file(folder / COMMON) if (folder / COMMON).is_file() else {}
    return int(common.get("iteration") or 1) if isinstance(common, dict) else 1
