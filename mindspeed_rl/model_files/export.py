"""The export of a model by several ranks at once; it goes on where an earlier one was cut off."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from mindspeed_rl.convert.target import OutputTensor
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.model_files.export_folder import ExportFolder
from mindspeed_rl.model_files.export_plan import ExportPlan, slices_of
from mindspeed_rl.model_files.reading import STORED_TYPES, RowReader
from mindspeed_rl.model_files.rounds import gather_rows_of_files
from mindspeed_rl.model_files.row_files import RowFiles, is_whole, stored_sum
from mindspeed_rl.model_files.slices import Gathering, RowSlice, in_rounds, slice_bytes
from mindspeed_rl.model_files.together import FileProblem, raise_together, together
from mindspeed_rl.models.safetensors_files import safetensors_entries
from mindspeed_rl.parallel.small_collectives import gather_objects
from mindspeed_rl.weight_layouts.base import ShardLayout
from mindspeed_rl.weights.exchange import Params
from mindspeed_rl.weights.transports import Transport
from mindspeed_rl.weights.verify import source_sums


def export_model(
    layout: ShardLayout,
    params: Params,
    plan: ExportPlan,
    folder: ExportFolder,
    *,
    rank: int,
    ranks_per_node: int,
    transport: Transport,
    buffer_bytes: int,
    copied: Mapping[str, Path] | None = None,
) -> int:
    """Write the model into a folder and give it its name. Collective: the world.

    Files of an attempt that was cut off are kept where their content has the checksums of the
    present weights. A rank holds at most ``buffer_bytes`` on its device, and one slice of a sixth
    of that on the host.

    Args:
        layout: Layout of the trainer.
        params: Parameters of this rank by name.
        plan: Files and their writers.
        folder: Folder of the export.
        rank: Global rank.
        ranks_per_node: Number of ranks per node.
        transport: Transport of all ranks.
        buffer_bytes: Bound of the memory of a rank on its device.
        copied: File of each tensor that is copied from elsewhere.

    Returns:
        Number of files that were there already.

    Raises:
        UsageError: The target is no export, or a file to copy from is damaged; raised on all ranks.
        OSError: A file could not be written, or not read; raised on all ranks.
    """
    most = slice_bytes(buffer_bytes)
    copied = copied or {}
    names = {planned.file.path for planned in plan.files}
    keeps = rank in plan.keepers
    together(lambda: folder.prepare(names) if keeps else None)
    found = [f for f in plan.files_of(rank) if os.path.exists(folder.work / f.path)]
    done: list[str] = []
    if any(gather_objects(bool(found))):
        sums = source_sums(layout, rank, params, folder.dtype)

        def sum_of(name: str) -> tuple[int, int]:
            return _sum_in_file(copied[name], name, most) if name in copied else sums[name]

        done = [f.path for f in found if is_whole(folder.work, f, sum_of, most)]
    everyone = dict(enumerate(gather_objects(done)))
    files = RowFiles(folder.work, [f for f in plan.files_of(rank) if f.path not in done])
    gathering = Gathering(layout, ranks_per_node)
    rounds = in_rounds(plan.queues(most, everyone), gathering.parts_of, most)
    writer = _SteadyWriter(files, folder)
    try:
        gather_rows_of_files(rounds, gathering.parts_of, rank, params, transport, writer.write_rows)
        writer.copy(copied, most)
    finally:
        files.close()
    raise_together(writer.problem)
    together(lambda: folder.finish([p.file for p in plan.files]) if keeps else None)
    return sum(map(len, everyone.values()))


class _SteadyWriter:
    """Writes until the first error of a file, which it keeps: peers wait in no round.

    Attributes:
        problem: The error; ``None``: there was none.
    """

    def __init__(self, files: RowFiles, folder: ExportFolder) -> None:
        self._files, self._folder = files, folder
        self.problem: FileProblem | None = None

    def write_rows(self, rows: RowSlice, values: torch.Tensor) -> None:
        """Write the rows of a slice."""
        if self.problem is None:
            try:
                with self._folder.explained():
                    self._files.write(rows.hf_name, rows.box.lo[0], values)
            except OSError as error:
                self.problem = error

    def copy(self, copied: Mapping[str, Path], most: int) -> None:
        """Copy the tensors of this rank's files that come from other files."""
        if self.problem is None:
            try:
                self._copy(copied, most)
            except (UsageError, OSError) as error:
                self.problem = error

    def _copy(self, copied: Mapping[str, Path], most: int) -> None:
        with RowReader() as reader:
            for tensor in (t for file in self._files.files for t in file.tensors):
                if tensor.name in copied:
                    path = copied[tensor.name]
                    entry = safetensors_entries(path)[tensor.name]
                    for rows in slices_of(tensor, most):
                        self.write_rows(rows, reader.read(path, entry, rows.box))


def stored_tensor(path: Path, name: str) -> OutputTensor:
    """Return a tensor of a file as one to be written again, in its own element type. Local."""
    entry = safetensors_entries(path)[name]
    return OutputTensor(name, STORED_TYPES[entry.dtype], entry.shape, ())


def _sum_in_file(path: Path, name: str, most: int) -> tuple[int, int]:
    with RowReader() as reader:
        entry = safetensors_entries(path)[name]
        return stored_sum(reader, path, entry, stored_tensor(path, name), most)
