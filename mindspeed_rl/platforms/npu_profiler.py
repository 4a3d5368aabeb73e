"""The profiler of torch_npu, whose traces are folders for MindStudio Insight."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from pathlib import Path

import torch_npu.profiler

from mindspeed_rl.config.diagnostics import ProfilerConfig


class NpuProfiler:
    """A profiler of one window, whose :meth:`stop` writes and analyses the trace.

    Args:
        config: What is recorded.
        folder: Folder of the trace.
        worker: Name of this process in the name of its trace.
    """

    def __init__(self, config: ProfilerConfig, folder: Path, worker: str) -> None:
        self._folder, self._worker = folder, worker
        levels = {
            "level0": torch_npu.profiler.ProfilerLevel.Level0,
            "level1": torch_npu.profiler.ProfilerLevel.Level1,
            "level2": torch_npu.profiler.ProfilerLevel.Level2,
        }
        self._profiler = torch_npu.profiler.profile(
            activities=[
                torch_npu.profiler.ProfilerActivity.CPU,
                torch_npu.profiler.ProfilerActivity.NPU,
            ],
            on_trace_ready=torch_npu.profiler.tensorboard_trace_handler(
                str(folder), worker_name=worker
            ),
            record_shapes=config.profile_record_shapes,
            profile_memory=config.profile_with_memory,
            with_stack=config.profile_with_stack,
            experimental_config=torch_npu.profiler._ExperimentalConfig(
                profiler_level=levels[config.profile_level]
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
        trace = f"{self._worker}_{os.getpid()}_*_ascend_pt"
        if not any(self._folder.glob(f"{trace}/ASCEND_PROFILER_OUTPUT")):
            warnings.warn(
                f"--profile: torch_npu left no trace in {self._folder}; what it printed says why",
                stacklevel=2,
            )
