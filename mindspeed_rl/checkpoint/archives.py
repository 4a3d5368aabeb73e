"""Writes files of tensors: archives of ``torch.save``, one after the other."""

from __future__ import annotations

import errno
import io
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import torch

from mindspeed_rl.checkpoint.checksums import FileMark, HashingFile


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that is on the disk.

    Attributes:
        mark: Its size and checksum.
        places: Offset and length of each archive, in bytes.
    """

    mark: FileMark
    places: tuple[tuple[int, int], ...]


def write_archives(path: Path, contents: Sequence[torch.Tensor | io.BytesIO]) -> WrittenFile:
    """Write a file and flush it to disk; its bytes are hashed on their way. Local.

    Args:
        path: Path of the new file.
        contents: Tensors, of which one at a time is copied to the host, and finished archives.

    Raises:
        OSError: It cannot be written; the message names the path, and bytes if the disk is full.
    """
    places = []
    try:
        with path.open("wb") as target:
            file = HashingFile(target)
            for content in contents:
                start = file.tell()
                if isinstance(content, torch.Tensor):
                    torch.save(_alone(content), cast(IO[bytes], file))
                else:
                    file.write(content.getbuffer())
                file.check()
                places.append((start, file.tell() - start))
            return WrittenFile(file.finish(), tuple(places))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(error.errno, error.strerror, str(path)) from error
        needed = sum(_num_bytes(content) for content in contents)
        raise OSError(
            error.errno,
            f"{path}: {error.strerror}: the file needs {needed / 2**20:.1f} MiB, of which "
            f"{path.stat().st_size / 2**20:.1f} MiB were written; "
            f"{shutil.disk_usage(path.parent).free / 2**20:.1f} MiB are free",
        ) from error


def _alone(content: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the host whose memory holds nothing else: archives hold all of it."""
    found = content.cpu().contiguous()
    if found.untyped_storage().nbytes() != found.nbytes:
        found = found.clone()
    return found.flatten().view(found.shape)  # archives hold the strides of axes of size 1, too


def _num_bytes(content: torch.Tensor | io.BytesIO) -> int:
    return content.nbytes if isinstance(content, torch.Tensor) else content.getbuffer().nbytes
