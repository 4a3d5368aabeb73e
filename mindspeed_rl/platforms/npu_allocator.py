"""Asks and sets the NPU's caching allocator while the process runs: its blocks, and its segments.

Expandable segments reduce fragmentation in training, but the engine's memory pool cannot be built
with them, and graphs are captured without. So they are off while the engine is built and while its
weights are in memory, and on at other times, if the user asked for them.
"""

from __future__ import annotations

import importlib
import os

from mindspeed_rl.platforms.allocator_settings import WANTED
from mindspeed_rl.platforms.cached_memory import free_ranges


def swaps_segments() -> bool:
    """Whether the user asked for expandable segments, which the start of the run removed."""
    return os.environ.get(WANTED) == "1"


def free_blocks() -> list[range]:
    """Return the addresses of cached memory that no tensor has, in all pools of the process."""
    memory = importlib.import_module("torch_npu.npu.memory")
    return free_ranges(memory.memory_snapshot())


def set_expandable_segments(on: bool) -> None:
    """Switch expandable segments for later allocations. Local; torch_npu 2.9 or newer."""
    memory = importlib.import_module("torch_npu.npu.memory")
    memory._set_allocator_settings(f"expandable_segments:{on}")
