"""Checkpoints in megatron-core's distributed format (``torch_dist``) as targets.

One chunk for each parameter of the whole model, which every layout can load. Beside the weights
there are the empty states that megatron-core's linear layers ask for.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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

from mindspeed_rl.convert.classic_source import TRACKER
from mindspeed_rl.convert.distributed_source import COMMON, FORMAT, INDEX, key_of
from mindspeed_rl.convert.target import OutputFile, OutputTensor, Target, params_of_rank
from mindspeed_rl.convert.torch_files import (
    read_torch_file,
    save_unfilled,
    saved_bytes,
    stored_tensor,
)
from mindspeed_rl.weights.layouts.checkpoint_files import CheckpointLayout

_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
# Rows of these modules are linear layers, which keep a state besides their weight.
_LINEAR = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "linear_q_proj",
           "linear_q_up_proj", "linear_kv_up_proj")  # fmt: skip
_FILE_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A parameter of the whole model: its key, its position among those of one key, and it."""

    key: str
    position: tuple[int, ...]
    tensor: OutputTensor


def plan_distributed(
    layout: CheckpointLayout,
    dtype_of: Callable[[str], torch.dtype],
    iteration: int,
    arguments: Mapping[str, Any],
    record: Mapping[str, Any],
    record_name: str,
) -> Target:
    """``iter_<iteration>`` in the distributed format, and the tracker file.

    Args:
        layout: one rank that holds everything.
        dtype_of: element type of an HF tensor; a parameter takes that of its first.
        iteration: in the name of the folder and in the files.
        arguments: of a run, for readers that look them up.
        record: what mindspeed_rl's own trainer reads of a checkpoint; files are added.
        record_name: its file.
    """
    # all layers share keys where they are alike: no experts, as the trainer itself saves
    stacked = layout.spec.moe is None
    chunks = tuple(_chunks(layout, dtype_of, stacked))
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
    common = {"checkpoint_version": 3.0, "iteration": iteration}
    small = {
        f"{folder}/{INDEX}": pickle.dumps(index, protocol=2),
        f"{folder}/{FORMAT}": json.dumps(_FORMAT).encode(),
        f"{folder}/{COMMON}": saved_bytes({**common, "args": argparse.Namespace(**arguments)}),
        TRACKER: f"{iteration}".encode(),
    }
    sizes |= {p.removeprefix(f"{folder}/"): len(data) for p, data in small.items() if "/" in p}
    small[f"{folder}/{record_name}"] = json.dumps({**record, "files": sizes}, indent=1).encode()
    outputs = tuple(
        OutputFile(
            f"{folder}/{file.name}", tuple(chunk.tensor for chunk in file.chunks), file.frame
        )
        for file in files
    )
    return Target(outputs, small, {name: dtype_of(name) for name in layout.hf_shapes})


def _chunks(
    layout: CheckpointLayout, dtype_of: Callable[[str], torch.dtype], stacked: bool
) -> Iterator[_Chunk]:
    for param, tensor in params_of_rank(layout, 0, dtype_of).items():
        yield _Chunk(*key_of(param, stacked), tensor)


def _counts(chunks: Sequence[_Chunk]) -> dict[str, tuple[int, ...]]:
    """How many parameters share each key, along each axis of their positions."""
    counts: dict[str, tuple[int, ...]] = {}
    for chunk in chunks:
        known = counts.get(chunk.key, (0,) * len(chunk.position))
        counts[chunk.key] = tuple(max(n, p + 1) for n, p in zip(known, chunk.position, strict=True))
    return counts


def _states(chunks: Sequence[_Chunk], counts: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Keys of the states that linear layers keep besides their weight; they are empty."""
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
    entry.chunks.append(ChunkStorageMetadata(_offsets(chunk), torch.Size(_shape(chunk))))


def _offsets(chunk: _Chunk) -> torch.Size:
    return torch.Size((*chunk.position, *(0 for _ in chunk.tensor.shape)))


def _shape(chunk: _Chunk) -> tuple[int, ...]:
    """With an axis of one for each axis that parameters of a key are stacked along."""
    return (*(1 for _ in chunk.position), *chunk.tensor.shape)


def _files(chunks: Sequence[_Chunk], states: Sequence[str]) -> Iterator[_File]:
    """Files of about 4 GiB; the states are in the first."""
    groups: list[list[_Chunk]] = [[]]
    filled = 0
    for chunk in chunks:
        if groups[-1] and filled + chunk.tensor.num_bytes > _FILE_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(chunk)
        filled += chunk.tensor.num_bytes
    for number, group in enumerate(groups):
        yield _File(f"__{number}_0.distcp", tuple(group), () if number else tuple(states))


@dataclass(frozen=True, slots=True)
class _File:
    """Archives of one tensor each behind one another, then the states."""

    name: str
    chunks: tuple[_Chunk, ...]
    states: tuple[str, ...]

    def places(self, file: IO[bytes]) -> dict[MetadataIndex, _StorageInfo]:
        """Write the file with holes for the tensors; the archive of each tensor and state in it."""
        found = {}
        entries: tuple[_Chunk | str, ...] = (*self.chunks, *self.states)
        for entry in entries:
            start = file.tell()
            if isinstance(entry, str):
                file.write(saved_bytes([None]))
                place = MetadataIndex(entry)
            else:
                save_unfilled(file, [(entry.tensor.dtype, _shape(entry))], lambda made: made[0])
                place = MetadataIndex(entry.key, _offsets(entry))
            found[place] = _StorageInfo(self.name, start, file.tell() - start)
        return found

    def frame(self, path: Path) -> list[int]:
        """Make the file with holes for the tensors; first byte of each."""
        with path.open("wb") as file:
            infos = list(self.places(file).values())[: len(self.chunks)]
        return [
            stored_tensor(path, read_torch_file(path, i.offset, i.length), i.offset).offset
            for i in infos
        ]


class _Nowhere(io.BytesIO):
    """A file that keeps the position alone: archives are planned before there is a file."""

    _position = 0

    def write(self, data: Any) -> int:
        """Move on."""
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move on, or to a place."""
        self._position = offset + (self._position if whence else 0)
        return self._position

    def tell(self) -> int:
        """Where the next byte would be."""
        return self._position
