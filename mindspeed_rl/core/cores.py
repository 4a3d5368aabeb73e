"""The cores of this process: bound for a rank, and given back in the processes that it starts."""

from __future__ import annotations

import os
from collections.abc import Collection, MutableMapping

UNBOUND = "MINDSPEED_RL_UNBOUND_CORES"
"""Environment variable with the cores that a rank had before it was bound, for its children."""


def bind_process(cores: Collection[int], environ: MutableMapping[str, str]) -> None:
    """Let this thread, and all threads and processes that it starts, run on some cores only."""
    before = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores)
    environ[UNBOUND] = ",".join(map(str, before))


def release_process(environ: MutableMapping[str, str]) -> None:
    """Let this process run on the cores that the rank which started it had before it was bound.

    No effect in a process of another origin.
    """
    if cores := environ.pop(UNBOUND, ""):
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
