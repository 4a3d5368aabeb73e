"""Checks the shared memory of a node before engines use it."""

from __future__ import annotations

import shutil
from pathlib import Path

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.owned_folders import SHARED_MEMORY

# Segments of a rank for the sums of tensor parallelism, and of an engine for messages of vLLM.
_RANK_BYTES, _QUEUE_BYTES = 5 << 20, 25 << 20


def check_shared_memory(num_ranks: int, tp: int) -> None:
    """Check that shared memory has room for the engines of this node. Local.

    Args:
        num_ranks: Number of ranks on this node.
        tp: Number of ranks of an engine that share each layer.

    Raises:
        UsageError: It has less; without this check a rank would be killed by SIGBUS.
    """
    needed = num_ranks * _RANK_BYTES + -(-num_ranks // tp) * _QUEUE_BYTES
    free = shutil.disk_usage(SHARED_MEMORY).free if Path(SHARED_MEMORY).is_dir() else 0
    if free < needed:
        raise UsageError(
            f"--rollout-tp {tp}: engines of this node share memory through {SHARED_MEMORY} and "
            f"need {needed / 2**20:.0f} MiB of it, {free / 2**20:.0f} MiB are free; start the "
            "container with a larger --shm-size, or end what fills it"
        )
