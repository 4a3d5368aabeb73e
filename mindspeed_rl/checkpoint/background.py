"""Writes checkpoints in a thread while the run goes on."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from mindspeed_rl.checkpoint.saving import UnwrittenCheckpoint
from mindspeed_rl.checkpoint.staging import StagingMemory

# A rank that ends, ends the job; a slow disk of one rank is no reason for the others to give up.
_LONGEST_WRITE = timedelta(hours=24)
# Of 19; the step that runs meanwhile has the core first where there are more threads than cores.
_NICENESS = 15


class BackgroundWriter:
    """Writes one checkpoint at a time in a thread of every rank. Collective: the world.

    Only the copy of the state to host memory, which is kept for the next checkpoint, is made at
    once; values are checked and files are written in the thread.

    The threads agree among themselves, in a process group of their own, when all have written, so
    a checkpoint becomes valid without waiting for the end of a step. They give way to the step
    where cores are few, and do not keep a process that ends from ending.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=_LONGEST_WRITE)
        self._thread: threading.Thread | None = None
        self._memory = StagingMemory()
        self._written: Path | None = None
        self._error: BaseException | None = None

    def start(self, unwritten: UnwrittenCheckpoint) -> None:
        """Copy a checkpoint to memory of its own and begin to write it.

        The one before must have been waited for.
        """
        assert self._thread is None, "a checkpoint is still being written"
        unwritten.stage(self._memory)
        self._thread = threading.Thread(
            target=self._write, args=(unwritten,), name="checkpoint writer", daemon=True
        )
        self._thread.start()

    def poll(self) -> Path | None:
        """Return the checkpoint that was written since the last call, if it is. Local.

        Raises:
            FloatingPointError, OSError, UsageError: What the check of the values or
                :meth:`UnwrittenCheckpoint.write` has raised.
        """
        if self._thread is None or self._thread.is_alive():
            return None
        return self.wait()

    def wait(self) -> Path | None:
        """Wait for the checkpoint that is being written and return it; ``None``: there is none.

        Raises:
            FloatingPointError, OSError, UsageError: What the check of the values or
                :meth:`UnwrittenCheckpoint.write` has raised.
        """
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        written, error = self._written, self._error
        self._written = self._error = None
        if error is not None:
            raise error
        return written

    def _write(self, unwritten: UnwrittenCheckpoint) -> None:
        _give_way()
        try:
            unwritten.check_values(self._group)
            self._written = unwritten.write(self._group)
        except BaseException as error:  # the next step border raises it in the run's own thread
            self._error = error


def _give_way() -> None:
    """Lower the priority of this thread, and of those that it starts, where the system has one."""
    if sys.platform == "linux":
        with suppress(PermissionError):  # a sandbox forbids the call; the write is as right
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
