"""Expandable segments of the NPU's caching allocator, switched while the process runs.

Training wants them, against fragmentation. The engine's memory pool cannot be built with them, and
graphs are captured without. So they are off while the engine is built and while its weights are
there, and on in between, where the user asked for them.
"""

from __future__ import annotations

import importlib
import os

from mindspeed_rl.platforms.allocator_settings import WANTED


def swaps_segments() -> bool:
    """Whether the user asked for expandable segments, which were taken out at the start."""
    return os.environ.get(WANTED) == "1"


def set_expandable_segments(on: bool) -> None:
    """For allocations from now on. Local; torch_npu 2.9 or newer.

    Raises:
        RuntimeError: this torch_npu has no such switch.
    """
    memory = importlib.import_module("torch_npu.npu.memory")
    try:
        switch = memory._set_allocator_settings
    except AttributeError as error:
        raise RuntimeError(
            "torch_npu.npu.memory._set_allocator_settings is gone; written for torch_npu 2.10. "
            "Take expandable_segments out of PYTORCH_NPU_ALLOC_CONF, or install that version"
        ) from error
    switch(f"expandable_segments:{on}")
