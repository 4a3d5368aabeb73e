"""What a user is told when a checkpoint does not fit onto the disk."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from mindspeed_rl.checkpoint.resume import partial_path, size_text

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def space_line(directory: str | os.PathLike[str], step: int, needed: int) -> str:
    """Return how much room a checkpoint needs, took until now, and how much is free. Local.

    Args:
        directory: Folder of the run's checkpoints.
        step: Step of the checkpoint, which is being written.
        needed: Bytes of the whole checkpoint.
    """
    free = shutil.disk_usage(directory).free
    written = sum(f.stat().st_size for f in partial_path(directory, step).rglob("*.distcp"))
    return (
        f"it needs about {size_text(needed)}, {size_text(written)} were written, "
        f"{size_text(free)} are free"
    )


@contextmanager
def named_disk(directory: str, step: int, needed: int) -> Iterator[None]:
    """Name the folder, and what is free there, if writing a checkpoint fails for want of space.

    Libraries that write in C++ say no more than "iostream error" of a full disk.

    Raises:
        OSError: The disk is full; other errors of the body go on as they are.
    """
    try:
        yield
    except Exception as error:
        told = isinstance(error, OSError) and error.errno in _FULL
        if "--save" in str(error) or not (told or "iostream error" in str(error)):
            raise
        raise OSError(
            errno.ENOSPC,
            f"--save {directory}: the checkpoint of step {step} could not be written, the disk is "
            f"full or a quota is used up ({space_line(directory, step, needed)}): make room and "
            "start again with --load; earlier checkpoints are untouched, and what was written is "
            "removed then",
        ) from error
