"""The profiler of torch_npu, whose traces are folders for MindStudio Insight."""

from __future__ import annotations

import multiprocessing
import os
import warnings

import torch_npu.profiler

from mindspeed_rl.platforms.base import ProfileRequest


def _level(name: str) -> object:
    """Return torch_npu's constant for a level, which has MindSpeed's name."""
    levels = {
        "level0": torch_npu.profiler.ProfilerLevel.Level0,
        "level1": torch_npu.profiler.ProfilerLevel.Level1,
        "level2": torch_npu.profiler.ProfilerLevel.Level2,
    }
    return levels[name]


class NpuProfiler:
    """A profiler of one window, whose :meth:`stop` writes and analyses the trace.

    Args:
        request: What to record, and where to write it.
    """

    def __init__(self, request: ProfileRequest) -> None:
        self._request = request
        self._profiler = torch_npu.profiler.profile(
            activities=[
                torch_npu.profiler.ProfilerActivity.CPU,
                torch_npu.profiler.ProfilerActivity.NPU,
            ],
            on_trace_ready=torch_npu.profiler.tensorboard_trace_handler(
                str(request.folder), worker_name=request.worker
            ),
            record_shapes=request.record_shapes,
            profile_memory=request.with_memory,
            with_stack=request.with_stack,
            experimental_config=torch_npu.profiler._ExperimentalConfig(
                profiler_level=_level(request.level)
            ),
        )

    def start(self) -> None:
        self._profiler.start()

    def stop(self, window: str) -> None:
        """Write ``<worker>_<process>_<time>_ascend_pt``, torch_npu's name, without the window.

        torch_npu analyses the trace in forks and makes fork the start method of the process, which
        is undone here. It prints its own errors; a warning says when there is no trace.
        """
        method = multiprocessing.get_start_method(allow_none=True)
        try:
            self._profiler.stop()
        finally:
            multiprocessing.set_start_method(method, force=True)
        folder, worker = self._request.folder, self._request.worker
        if not any(folder.glob(f"{worker}_{os.getpid()}_*_ascend_pt/ASCEND_PROFILER_OUTPUT")):
            warnings.warn(
                f"--profile: torch_npu left no trace in {folder}; what it printed says why",
                stacklevel=2,
            )
