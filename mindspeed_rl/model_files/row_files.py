"""Files of one rank that are filled row by row and get their names when they are whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from mindspeed_rl.convert.target import SAFETENSORS_TYPES, OutputFile, OutputTensor
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.files import sync_path
from mindspeed_rl.model_files.export_plan import slices_of
from mindspeed_rl.model_files.reading import RowReader
from mindspeed_rl.models.safetensors_files import StoredEntry, safetensors_entries
from mindspeed_rl.proof.checksums import box_checksum

PART = ".part"

# Returns the checksum that a tensor should have.
SumOf = Callable[[str], tuple[int, int]]


@dataclass
class _Open:
    """A file that is being filled: its descriptor, first byte by tensor, and bytes to come."""

    file: OutputFile
    descriptor: int
    starts: Mapping[str, int]
    left: int


@dataclass
class RowFiles:
    """The files that one rank writes. Local.

    Args:
        folder: Folder of the files.
        files: Files that are not whole yet.
    """

    folder: Path
    files: Sequence[OutputFile]
    _open: dict[str, _Open] = field(default_factory=dict)
    _tensors: dict[str, tuple[OutputFile, OutputTensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._tensors = {t.name: (file, t) for file in self.files for t in file.tensors}

    def write(self, hf_name: str, first_row: int, values: torch.Tensor) -> None:
        """Write whole rows of a tensor; a file whose last rows these are is flushed and named.

        Args:
            hf_name: Tensor.
            first_row: Number of the first row.
            values: [rows, ...] the rows, in the type of the file.

        Raises:
            OSError: The rows could not be written (full disk).
        """
        file, tensor = self._tensors[hf_name]
        assert values.dtype == tensor.dtype, f"{hf_name}: {values.dtype}, not {tensor.dtype}"
        opened = self._open.get(file.path) or self._begin(file)
        on_host = values.detach().to("cpu").contiguous().flatten().view(torch.uint8)
        memory = on_host.numpy().data
        position = opened.starts[hf_name] + first_row * (tensor.num_bytes // tensor.shape[0])
        done = 0
        while done < len(memory):
            done += os.pwrite(opened.descriptor, memory[done:], position + done)
        opened.left -= done
        if not opened.left:
            self._end(opened)

    def _begin(self, file: OutputFile) -> _Open:
        path = self.folder / (file.path + PART)
        starts = file.frame(path)
        names = [tensor.name for tensor in file.tensors]
        descriptor = os.open(path, os.O_WRONLY)
        opened = _Open(file, descriptor, dict(zip(names, starts, strict=True)), file.num_bytes)
        self._open[file.path] = opened
        return opened

    def _end(self, opened: _Open) -> None:
        del self._open[opened.file.path]
        os.fsync(opened.descriptor)
        os.close(opened.descriptor)
        path = self.folder / opened.file.path
        os.rename(path.with_name(path.name + PART), path)
        sync_path(self.folder)

    def close(self) -> None:
        """Close what is not whole; its content is of no use."""
        for opened in self._open.values():
            os.close(opened.descriptor)
            (self.folder / (opened.file.path + PART)).unlink(missing_ok=True)
        self._open = {}


def is_whole(folder: Path, file: OutputFile, sum_of: SumOf, slice_bytes: int) -> bool:
    """Tell whether a file of an earlier attempt is there with all the bits that it should have.

    A file that cannot be read is not, so that it is written again; peers wait for the answer.

    Args:
        folder: Folder of the file.
        file: The file as it is planned now.
        sum_of: Checksums of its tensors, as of :func:`stored_sum`.
        slice_bytes: Bytes that are read at a time.
    """
    try:
        return _has_sums(folder / file.path, file, sum_of, slice_bytes)
    except (UsageError, OSError):  # another attempt was killed in the middle of it, or it is lost
        return False


def _has_sums(path: Path, file: OutputFile, sum_of: SumOf, slice_bytes: int) -> bool:
    if not path.is_file():
        return False
    entries = safetensors_entries(path)
    expected = {t.name: (SAFETENSORS_TYPES[t.dtype], tuple(t.shape)) for t in file.tensors}
    if {name: (entry.dtype, entry.shape) for name, entry in entries.items()} != expected:
        return False
    with RowReader() as reader:
        return all(
            stored_sum(reader, path, entries[t.name], t, slice_bytes) == sum_of(t.name)
            for t in file.tensors
        )


def stored_sum(
    reader: RowReader, path: Path, entry: StoredEntry, tensor: OutputTensor, slice_bytes: int
) -> tuple[int, int]:
    """Return the checksum of a tensor in a file; see :mod:`~mindspeed_rl.proof.checksums`."""
    total = np.zeros(2, dtype=np.uint32)
    for rows in slices_of(tensor, slice_bytes):
        values = reader.read(path, entry, rows.box)
        total += box_checksum(values, rows.box, tensor.shape, tensor.dtype)
    first, second = total.view(np.int32).tolist()
    return first, second
