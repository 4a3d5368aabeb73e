"""Collects the results of a checkpoint's writers in a queue of this process.

Why: megatron-core takes the queue from a manager process that it spawns at the first save. That
process imports the entry module again (8 s), and outlives a rank that is killed. Only asynchronous
saves need the manager. This project's are synchronous: the function that fills the queue runs in
this process and its own writers report to it through another queue.
"""

from __future__ import annotations

import importlib
import queue
from collections.abc import Callable
from typing import Any

from mindspeed_rl.core.patching import Patch, apply_patch

_MODULE = "megatron.core.dist_checkpointing.strategies.filesystem_async"
# Name and parameters in megatron-core 0.16, and since 0.17.
_TARGETS: dict[str, tuple[str, ...]] = {
    "_get_write_results_queue": (),
    "get_write_results_queue": ("mp_mode",),
}


def apply() -> None:
    """Make megatron-core take a queue of this process for the results. Idempotent."""
    module = importlib.import_module(_MODULE)
    name = next((name for name in _TARGETS if hasattr(module, name)), next(iter(_TARGETS)))
    apply_patch(
        Patch(
            target=f"{_MODULE}:{name}",
            parameters=_TARGETS[name],
            make=_local_queue,
            why="a synchronous save needs no manager process",
            upstream="megatron/core/dist_checkpointing/strategies/filesystem_async.py",
            versions="megatron-core 0.16.1 and 0.18",
            remove_when="megatron-core saves synchronously without a manager",
        )
    )


def _local_queue(original: Callable[..., Any]) -> Callable[..., queue.Queue[Any]]:
    results: queue.Queue[Any] = queue.Queue()
    return lambda *_, **__: results
