"""The profiler of PyTorch, for CPU and CUDA."""

from __future__ import annotations

from pathlib import Path

import torch

from mindspeed_rl.config.diagnostics import ProfilerConfig


class TorchProfiler:
    """A profiler of one window, whose :meth:`stop` writes a Chrome trace.

    Args:
        config: What is recorded.
        folder: Folder of the trace.
        worker: Name of this process in the name of its trace.
        cuda: Whether to record CUDA kernels as well.
    """

    def __init__(self, config: ProfilerConfig, folder: Path, worker: str, *, cuda: bool) -> None:
        activity = torch.profiler.ProfilerActivity
        self._folder, self._worker = folder, worker
        self._profiler = torch.profiler.profile(
            activities=[activity.CPU, activity.CUDA] if cuda else [activity.CPU],
            record_shapes=config.profile_record_shapes,
            profile_memory=config.profile_with_memory,
            with_stack=config.profile_with_stack,
        )

    def start(self) -> None:
        self._profiler.start()

    def stop(self, window: str) -> None:
        """Write the trace as ``<worker>_<window>.pt.trace.json``."""
        self._profiler.stop()
        trace = self._folder / f"{self._worker}_{window}.pt.trace.json"
        self._profiler.export_chrome_trace(str(trace))
