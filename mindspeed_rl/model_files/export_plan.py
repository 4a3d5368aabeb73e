"""Which rank writes which tensors of an export into which file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from mindspeed_rl.convert.target import OutputFile, OutputTensor, in_files, safetensors_file
from mindspeed_rl.core.boxes import Box
from mindspeed_rl.model_files.slices import RowSlice, row_slices
from mindspeed_rl.models.hf_files import shard_names
from mindspeed_rl.weight_layouts.base import ShardLayout
from mindspeed_rl.weights.executor import wire_dtype

SHARD_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file of weights and who writes it.

    Attributes:
        file: Name, tensors and header.
        home: Place of its writer among the ranks of a copy of the export.
    """

    file: OutputFile
    home: int


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """All files of weights of an export, the same on all ranks.

    Attributes:
        files: The files in order.
        keepers: First rank of each copy of the export: rank 0, or the first rank of every node.
        copied: Tensors that are not the trainer's but are copied from other files.
    """

    files: tuple[PlannedFile, ...]
    keepers: range
    copied: frozenset[str]

    def files_of(self, rank: int) -> list[OutputFile]:
        """Return the files that a rank writes, of whichever copy."""
        homes = {rank - keeper for keeper in self.keepers}
        return [planned.file for planned in self.files if planned.home in homes]

    def queues(
        self, most_bytes: int, done: Mapping[int, Iterable[str]]
    ) -> dict[int, list[RowSlice]]:
        """Return the slices of the trainer's tensors that each rank writes, in order.

        Args:
            most_bytes: Bytes of a slice.
            done: Names of files that are whole already, by rank.
        """
        found: dict[int, list[RowSlice]] = {}
        for keeper in self.keepers:
            for planned in self.files:
                rank = keeper + planned.home
                if planned.file.path in done.get(rank, ()):
                    continue
                for tensor in planned.file.tensors:
                    if tensor.name not in self.copied:
                        found.setdefault(rank, []).extend(slices_of(tensor, most_bytes))
        return found


def slices_of(tensor: OutputTensor, most_bytes: int) -> list[RowSlice]:
    """Cut a tensor of a file into slices of whole rows."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    whole = Box.whole(tensor.shape)
    return row_slices(tensor.name, whole, dtype, tensor.dtype.itemsize, most_bytes)


def plan_export(
    layout: ShardLayout,
    dtype: torch.dtype,
    keepers: range,
    ranks_per_node: int,
    copied: Sequence[OutputTensor] = (),
    shard_bytes: int = SHARD_BYTES,
) -> ExportPlan:
    """Plan the files of an export. Pure: alike on all ranks.

    A model that fits into one file is written by the first rank of each copy. Where all nodes see
    the directory, a tensor is written by the first rank that holds a part of it: the first rank of
    its pipeline stage, or of its expert group. Where each node writes a copy of its own, its files
    are dealt to the ranks of the node.

    Args:
        layout: Layout of the trainer.
        dtype: Element type of tensors that declare none.
        keepers: First rank of each copy.
        ranks_per_node: Number of ranks per node.
        copied: Tensors of other files that the export has as well.
        shard_bytes: Size of a file at most, unless a single tensor is larger.
    """
    tensors = [
        OutputTensor(name, wire_dtype(layout.dtype_of(name), dtype), shape, ())
        for name, shape in layout.hf_shapes.items()
    ]
    if sum(t.num_bytes for t in (*tensors, *copied)) <= shard_bytes:
        groups = [(0, [*tensors, *copied])]
    elif len(keepers) > 1:
        several = in_files([*tensors, *copied], shard_bytes)
        groups = [(i % ranks_per_node, group) for i, group in enumerate(several)]
    else:
        groups = _by_home(tensors, lambda name: first_holder(layout, name), shard_bytes)
        homes = sorted({home for home, _ in groups})
        extra = in_files(copied, shard_bytes) if copied else []
        groups += [(homes[i % len(homes)], group) for i, group in enumerate(extra)]
    names = shard_names(len(groups))
    files = tuple(
        PlannedFile(safetensors_file(name, _by_width(group)), home)
        for name, (home, group) in zip(names, groups, strict=True)
    )
    return ExportPlan(files, keepers, frozenset(tensor.name for tensor in copied))


def first_holder(layout: ShardLayout, hf_name: str) -> int:
    """Return the first rank that holds a part of a tensor. Pure."""
    return min(shard.owner_ranks[0] for shard in layout.shards(hf_name) if not shard.is_replica)


def _by_home(
    tensors: Iterable[OutputTensor], home_of: Callable[[str], int], shard_bytes: int
) -> list[tuple[int, list[OutputTensor]]]:
    homes: dict[int, list[OutputTensor]] = {}
    for tensor in tensors:
        homes.setdefault(home_of(tensor.name), []).append(tensor)
    return [(home, group) for home in sorted(homes) for group in in_files(homes[home], shard_bytes)]


def _by_width(tensors: Iterable[OutputTensor]) -> list[OutputTensor]:
    """Sort tensors so that each begins at a multiple of the size of its elements."""
    return sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
