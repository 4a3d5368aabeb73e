"""Reading of a checkpoint once per node: ranks read in turn and hand rows to each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import torch

from mindspeed_rl.checkpoint.hf import check_tensor, check_values, wanted_by_file
from mindspeed_rl.core.boxes import Box
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.model_files.reading import STORED_TYPES, RowReader
from mindspeed_rl.model_files.rounds import scatter_rows_of_files
from mindspeed_rl.model_files.slices import (
    RowSlice,
    Scattering,
    in_rounds,
    row_slices,
    slice_bytes,
    within,
)
from mindspeed_rl.model_files.together import FileProblem, raise_together, together
from mindspeed_rl.models.safetensors_files import StoredEntry, safetensors_entries
from mindspeed_rl.weight_layouts.base import ShardLayout, pieces_of
from mindspeed_rl.weights.transports import Transport


def node_of(rank: int, ranks_per_node: int) -> range:
    """Return the ranks of the node of a rank. Pure."""
    first = rank // ranks_per_node * ranks_per_node
    return range(first, first + ranks_per_node)


def plan_reads(
    layout: ShardLayout, node: range, types: Mapping[str, torch.dtype], most_bytes: int
) -> dict[int, list[RowSlice]]:
    """Return the rows that each rank of a node reads: each row that a rank keeps, once. Pure.

    Rows are read by one of the ranks that keep a part of them, the one that has least to read;
    neighbouring rows that the same ranks keep are read by the same one.

    Args:
        layout: Layout of the trainer.
        node: Ranks of the node.
        types: Element types in the files of the tensors to read, in the order of the files.
        most_bytes: Bytes of a slice.
    """
    held = {name for rank in node for name in layout.held_names(rank)}
    queues: dict[int, list[RowSlice]] = {}
    given: Counter[int] = Counter()
    for name, dtype in types.items():
        if name not in held:
            continue
        spelled = str(dtype).removeprefix("torch.")
        for rows, keepers in _kept_rows(layout, name, node):
            slices = row_slices(name, rows, spelled, dtype.itemsize, most_bytes)
            reader = min(keepers, key=lambda rank: (given[rank], rank))
            given[reader] += sum(part.num_bytes for part in slices)
            queues.setdefault(reader, []).extend(slices)
    return queues


def _kept_rows(
    layout: ShardLayout, hf_name: str, node: range
) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Yield the rows of a tensor that ranks of a node keep a part of, each time with these ranks.

    Rows between two borders of pieces are kept by the same ranks.
    """
    kept = [
        (shard.piece.hf_box, owners)
        for shard in layout.shards(hf_name)
        if (owners := within(shard.owner_ranks, node))
    ]
    borders = sorted({edge for box, _ in kept for edge in (box.lo[0], box.lo[0] + box.size[0])})
    whole = Box.whole(layout.shape_of(hf_name))
    for first, last in pairwise(borders):
        rows = whole.with_dim(0, first, last - first)
        keepers = {rank for box, owners in kept if box.intersect(rows) for rank in owners}
        if keepers:
            yield rows, tuple(sorted(keepers))


@torch.no_grad()
def load_by_node(
    directory: str | Path,
    layout: ShardLayout,
    rank: int,
    params: Mapping[str, torch.Tensor],
    *,
    ranks_per_node: int,
    transport: Transport,
    buffer_bytes: int,
    left_out: Collection[str] = (),
    flag: str = "--hf-checkpoint",
) -> int:
    """Fill parameters from a checkpoint of which a node reads no byte twice. Collective: the world.

    What arrives, which padding and which value heads become 0, and what is refused are as in
    :func:`~mindspeed_rl.checkpoint.hf.load_hf`. All ranks read the headers. Rows travel within
    nodes; an error of one rank is raised on all ranks of the world.

    Args:
        directory: Directory with safetensors weights.
        layout: Layout that says what a rank holds.
        rank: Global rank.
        params: Local parameters by name; written in place, cast to their dtype.
        ranks_per_node: Number of ranks per node.
        transport: Transport between hosts that reaches the ranks of the node.
        buffer_bytes: Bound of the host memory of rows.
        left_out: Tensors of the checkpoint that the model does not have by design.
        flag: Flag that names the directory, for messages.

    Returns:
        Bytes of weights that this rank read.

    Raises:
        UsageError: As ``load_hf``.
        OSError: A file cannot be read.
    """
    entries = together(
        lambda: _entries(layout, wanted_by_file(directory, layout, rank, left_out, flag))
    )
    node = node_of(rank, ranks_per_node)
    most = slice_bytes(buffer_bytes)
    types = {name: STORED_TYPES[entry.dtype] for name, (_, entry) in entries.items()}
    queues = plan_reads(layout, node, types, max(1, most // ranks_per_node))
    scattering = Scattering(layout, node)
    rounds = in_rounds(queues, scattering.parts_of, most)
    for param in params.values():
        param.zero_()
    with RowReader() as reader:
        steady = _SteadyReader(reader, entries)
        scatter_rows_of_files(rounds, scattering.parts_of, rank, params, transport, steady.read)
    raise_together(steady.problem)
    files = {name: path for name, (path, _) in entries.items()}
    together(lambda: _check_held(layout, rank, params, files, flag))
    return reader.num_bytes


class _SteadyReader:
    """Reads until the first error of a file, which it keeps: peers wait in no round.

    Attributes:
        problem: The error; ``None``: there was none.
    """

    def __init__(self, reader: RowReader, entries: Mapping[str, tuple[Path, StoredEntry]]) -> None:
        self._reader, self._entries = reader, entries
        self.problem: FileProblem | None = None

    def read(self, rows: RowSlice) -> torch.Tensor:
        """Return the rows of a slice; zeros after an error."""
        path, entry = self._entries[rows.hf_name]
        if self.problem is None:
            try:
                return self._reader.read(path, entry, rows.box)
            except UsageError as error:
                self.problem = error
            except OSError as error:
                self.problem = OSError(f"{path}: {error}")
        return torch.zeros(rows.box.size, dtype=STORED_TYPES[entry.dtype])


def _entries(
    layout: ShardLayout, by_file: Mapping[Path, Collection[str]]
) -> dict[str, tuple[Path, StoredEntry]]:
    """Return file and place of each tensor, in the order of the files. Local.

    Raises:
        UsageError: A tensor is missing or has another shape.
    """
    entries: dict[str, tuple[Path, StoredEntry]] = {}
    for path, names in by_file.items():
        stored = safetensors_entries(path)
        for name in names:
            entry = stored.get(name)
            check_tensor(path, name, entry, layout.shape_of(name))
            assert entry is not None
            entries[name] = path, entry
    return entries


def _check_held(
    layout: ShardLayout,
    rank: int,
    params: Mapping[str, torch.Tensor],
    files: Mapping[str, Path],
    flag: str,
) -> None:
    """Refuse values that are not finite or too large, once all ranks have theirs."""
    for piece in (shard.piece for shard in pieces_of(layout, rank)):
        if piece.hf_name in files:
            values = piece.view.of(params[piece.param])[piece.param_box.slices]
            check_values(flag, files[piece.hf_name], piece.hf_name, rank, values)
