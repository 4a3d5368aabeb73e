"""Rows of tensors in safetensors files, read with counted bytes."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from types import TracebackType

import torch

from mindspeed_rl.convert.target import SAFETENSORS_TYPES
from mindspeed_rl.core.boxes import Box
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.models.safetensors_files import StoredEntry

STORED_TYPES = {name: dtype for dtype, name in SAFETENSORS_TYPES.items()}


class RowReader:
    """Reads rows of tensors; use it as a context manager. Local.

    Attributes:
        num_bytes: Bytes that were read so far.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._files: dict[Path, int] = {}

    def __enter__(self) -> RowReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}

    def read(self, path: Path, entry: StoredEntry, box: Box) -> torch.Tensor:
        """Read whole rows of a tensor: [box.size], in the type of the file, on the host.

        Args:
            path: File of the tensor.
            entry: Its entry in the header.
            box: The rows; whole in all dimensions but the first.

        Raises:
            UsageError: The file has another length than when its header was read.
            OSError: It cannot be read.
        """
        dtype = STORED_TYPES[entry.dtype]
        row_bytes = prod(box.size[1:]) * dtype.itemsize
        content = torch.empty(box.size[0] * row_bytes, dtype=torch.uint8)
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY)
        memory = content.numpy().data
        position, done = entry.offset + box.lo[0] * row_bytes, 0
        while done < len(memory):
            count = os.preadv(self._files[path], [memory[done:]], position + done)
            if not count:
                raise UsageError(
                    f"{path} ends {len(memory) - done} bytes too early: it became shorter while "
                    "it was read; copy or download it again"
                )
            done += count
        self.num_bytes += done
        return content.view(dtype).view(box.size)
