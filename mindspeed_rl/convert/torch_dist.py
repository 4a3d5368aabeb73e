"""Checkpoints in megatron-core's distributed format (``torch_dist``).

The format keeps every parameter in coordinates of the whole model, cut into chunks that need not
match any layout. Chunks are concatenated archives of ``torch.save`` in ``*.distcp`` files. A target
has one chunk for each parameter, which every layout can load, and besides the weights the empty
states that megatron-core's linear layers ask for.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mindspeed_rl.checkpoint.metadata_files import COMMON, FORMAT_FILE, INDEX, read_index
from mindspeed_rl.checkpoint.names import shortened
from mindspeed_rl.checkpoint.resume import CONVERTED, RECORD, TRACKER, CheckpointRecord
from mindspeed_rl.convert.checkpoint_files import whole_layout
from mindspeed_rl.convert.format import Format, Request
from mindspeed_rl.convert.source import Source, StoredTensor, TensorPart
from mindspeed_rl.convert.target import (
    OutputFile,
    OutputTensor,
    Target,
    in_files,
    params_of_rank,
)
from mindspeed_rl.convert.torch_files import (
    read_torch_file,
    save_unfilled,
    saved_bytes,
    saved_iteration,
    stored_tensor,
)
from mindspeed_rl.convert.training_arguments import run_arguments
from mindspeed_rl.core.boxes import Box, ParamView
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.layout import round_up
from mindspeed_rl.models.param_names import distributed_names, recognised_from
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.weight_layouts.base import Shard

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.*)")
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
# Modules that are linear layers, which keep a state besides their weight.
_LINEAR = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "linear_q_proj",
           "linear_q_up_proj", "linear_kv_up_proj")  # fmt: skip
_FILE_BYTES = 4 << 30


def key_of(param: str, stacked: bool) -> tuple[str, tuple[int, ...]]:
    """Return the key of a whole parameter, and its position among those that share the key.

    Args:
        param: Name in the layout of one rank, one module per expert.
        stacked: Whether all layers share a key.
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


def open_distributed(folder: Path, spec: ModelSpec, extends_ep: bool) -> Source:
    """Open the weights of a distributed checkpoint; optimizer and random states are ignored.

    Raises:
        UsageError: Another format, unreadable files, or weights that the model does not have.
    """
    index = _read_index(folder)
    keys = index.state_dict_metadata
    stacked = any(key.startswith("decoder.layers.self_attention.") for key in keys)
    names = replace(recognised_from(keys, spec), experts="single", mtp=False)
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
            f"{folder}: {shortened(lacking)} missing, which config.json implies; give the "
            "config.json of this model (--hf-cfg-dir)"
        )

    places = _places(folder, index)

    @cache
    def chunks(key: str) -> tuple[tuple[Box, StoredTensor], ...]:
        return tuple(
            (box, _stored(folder / info.relative_path, key, box, info)) for box, info in places[key]
        )

    @cache
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


def _read_index(folder: Path) -> Any:
    """Read the index of a folder whose format is ``torch_dist``, or raise a UsageError."""
    try:
        kind = json.loads((folder / FORMAT_FILE).read_text(encoding="utf-8")).get("sharded_backend")
    except (ValueError, AttributeError, RecursionError) as error:  # also bytes that are not UTF-8
        raise UsageError(
            f"{folder / FORMAT_FILE}: no JSON object ({error}); copy it again"
        ) from error
    if kind != "torch_dist":
        raise UsageError(
            f"{folder}: distributed checkpoint of format {kind!r}; allowed: torch_dist. Save it "
            "with --ckpt-format torch_dist, or convert it with Megatron's own tool"
        )
    try:
        return read_index(folder / INDEX)
    except ValueError as error:
        raise UsageError(f"{folder}: {error}; copy it again") from error


def _places(folder: Path, index: Any) -> dict[str, list[tuple[Box, Any]]]:
    """Map each key to rectangles in whole-model coordinates, each with its place in a file."""
    sizes = {
        (key, tuple(chunk.offsets)): tuple(chunk.sizes)
        for key, entry in index.state_dict_metadata.items()
        for chunk in getattr(entry, "chunks", ())
    }
    places: dict[str, list[tuple[Box, Any]]] = {}
    for place, info in index.storage_data.items():
        if place.offset is not None:  # Entries without an offset are not tensors.
            offsets = tuple(place.offset)
            if (place.fqn, offsets) not in sizes:
                raise UsageError(
                    f"{folder / INDEX}: {place.fqn} has a part at {list(offsets)} without a shape; "
                    "copy it again"
                )
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
    """Yield the parts of a whole parameter's piece that the chunks hold."""
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
    record = folder / RECORD
    if record.is_file():
        try:
            return int(json.loads(record.read_text(encoding="utf-8"))["step"])
        except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
            raise UsageError(f"{record} is broken ({error}); copy the checkpoint again") from error
    return saved_iteration(read_torch_file(folder / COMMON) if (folder / COMMON).is_file() else {})


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A parameter of the whole model, its key, and its position among those that share the key."""

    key: str
    position: tuple[int, ...]
    tensor: OutputTensor

    @property
    def offsets(self) -> torch.Size:
        """Offsets of the parameter in the tensor that has the key."""
        return torch.Size((*self.position, *(0 for _ in self.tensor.shape)))

    @property
    def shape(self) -> torch.Size:
        """Shape with a leading axis of 1 for each axis along which parameters are stacked."""
        return torch.Size((*(1 for _ in self.position), *self.tensor.shape))


def plan_distributed(request: Request) -> Target:
    """Plan ``iter_<iteration>`` in the distributed format, and the tracker file."""
    spec, flags, iteration = request.spec, request.layout, request.source.iteration
    names = distributed_names(
        spec, transformer_engine=flags.transformer_impl == "transformer_engine"
    )
    padded = round_up(spec.vocab_size, flags.make_vocab_size_divisible_by)
    layout, dtypes = whole_layout(spec, names, padded), request.dtypes()
    # Layers share keys where all are alike, that is, without experts; the trainer saves like this.
    stacked = spec.moe is None
    params = params_of_rank(layout, 0, dtypes)
    chunks = tuple(_Chunk(*key_of(param, stacked), tensor) for param, tensor in params.items())
    counts = _counts(chunks)
    states = tuple(_states(chunks, counts))
    folder = f"iter_{iteration:07d}"
    files = tuple(_files(chunks, states))
    index = Metadata({}, storage_data={}, planner_data=None)
    sizes = {}
    for file in files:
        with _Nowhere() as sink:
            index.storage_data |= file.places(sink)
            sizes[file.name] = sink.tell()
    for chunk in chunks:
        _describe(index, chunk, counts[chunk.key])
    for state in states:
        index.state_dict_metadata[state] = BytesStorageMetadata()
    args = argparse.Namespace(**run_arguments(layout, ()))
    common = {"checkpoint_version": 3.0, "iteration": iteration, "args": args}
    small = {
        f"{folder}/{INDEX}": pickle.dumps(index, protocol=2),
        f"{folder}/{FORMAT_FILE}": json.dumps(_FORMAT).encode(),
        f"{folder}/{COMMON}": saved_bytes(common),
        TRACKER: f"{iteration}".encode(),
    }
    sizes |= {p.removeprefix(f"{folder}/"): len(data) for p, data in small.items() if "/" in p}
    record = asdict(_record(request)) | {"files": sizes}
    small[f"{folder}/{RECORD}"] = json.dumps(record, indent=1).encode()
    outputs = tuple(
        OutputFile(
            f"{folder}/{file.name}", tuple(chunk.tensor for chunk in file.chunks), file.frame
        )
        for file in files
    )
    return Target(outputs, small, {name: dtypes[name] for name in layout.hf_shapes})


def _record(request: Request) -> CheckpointRecord:
    """Make the record that this project's own trainer reads of a checkpoint."""
    return CheckpointRecord(
        step=request.source.iteration,
        num_updates=0,
        model=asdict(request.spec),
        layout=dict.fromkeys(("tp", "pp", "cp", "dp", "vpp", "ep", "etp"), 1),
        optimizer="",
        has_rng=False,
        extra={CONVERTED: request.source.place},
    )


def _counts(chunks: Sequence[_Chunk]) -> dict[str, tuple[int, ...]]:
    """Count the parameters that share each key, along each axis of their positions."""
    counts: dict[str, tuple[int, ...]] = {}
    for chunk in chunks:
        known = counts.get(chunk.key, (0,) * len(chunk.position))
        counts[chunk.key] = tuple(max(n, p + 1) for n, p in zip(known, chunk.position, strict=True))
    return counts


def _states(chunks: Sequence[_Chunk], counts: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Yield keys of the states that linear layers keep besides their weight; they are empty."""
    for chunk in chunks:
        module, _, kind = chunk.key.rpartition(".")
        if kind == "weight" and module.rpartition(".")[2] in _LINEAR:
            position = "_".join(map(str, chunk.position or (0,)))
            total = "_".join(map(str, counts[chunk.key] or (1,)))
            yield f"{module}._extra_state/shard_{position}_{total}"


def _describe(index: Metadata, chunk: _Chunk, count: tuple[int, ...]) -> None:
    shape = chunk.tensor.shape
    entry = index.state_dict_metadata.get(chunk.key)
    if entry is None:
        properties = TensorProperties(dtype=chunk.tensor.dtype)
        entry = TensorStorageMetadata(properties, torch.Size((*count, *shape)), [])
        index.state_dict_metadata[chunk.key] = entry
    assert isinstance(entry, TensorStorageMetadata)
    entry.chunks.append(ChunkStorageMetadata(chunk.offsets, chunk.shape))


def _files(chunks: Sequence[_Chunk], states: Sequence[str]) -> Iterator[_File]:
    """Yield files of about 4 GiB; the first one has the states."""
    of_param = {chunk.tensor.name: chunk for chunk in chunks}
    for number, tensors in enumerate(in_files([chunk.tensor for chunk in chunks], _FILE_BYTES)):
        group = tuple(of_param[tensor.name] for tensor in tensors)
        yield _File(f"__{number}_0.distcp", group, () if number else tuple(states))


@dataclass(frozen=True, slots=True)
class _File:
    """Concatenated archives of one tensor each, then the states."""

    name: str
    chunks: tuple[_Chunk, ...]
    states: tuple[str, ...]

    def places(self, file: IO[bytes]) -> dict[MetadataIndex, _StorageInfo]:
        """Write the file without the data of tensors; return the place of each archive in it."""
        found = {}
        entries: tuple[_Chunk | str, ...] = (*self.chunks, *self.states)
        for entry in entries:
            start = file.tell()
            if isinstance(entry, str):
                file.write(saved_bytes([None]))
                place = MetadataIndex(entry)
            else:
                save_unfilled(file, [(entry.tensor.dtype, entry.shape)], lambda made: made[0])
                place = MetadataIndex(entry.key, entry.offsets)
            found[place] = _StorageInfo(self.name, start, file.tell() - start)
        return found

    def frame(self, path: Path) -> list[int]:
        """Make the file without the data of tensors; return the first byte of each tensor."""
        with path.open("wb") as file:
            infos = list(self.places(file).values())[: len(self.chunks)]
        return [
            stored_tensor(path, read_torch_file(path, i.offset, i.length), i.offset).offset
            for i in infos
        ]


class _Nowhere(io.BytesIO):
    """A file that records only its position: archives are planned before there is a file."""

    _position = 0

    def write(self, data: Any) -> int:
        """Advance the position by the size of the data."""
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Change the position, relative to the present one or to the start."""
        self._position = offset + (self._position if whence else 0)
        return self._position

    def tell(self) -> int:
        return self._position


FORMAT = Format(
    name="torch_dist",
    model_type="mg",
    files=f"{FORMAT_FILE} and *.distcp",
    help="megatron-core's own, which every layout loads",
    recognises=lambda folder: (folder / FORMAT_FILE).is_file() and (folder / INDEX).is_file(),
    open=open_distributed,
    plan=plan_distributed,
    layout_flags=frozenset({"transformer_impl", "make_vocab_size_divisible_by"}),
    writes_mtp=False,
)
