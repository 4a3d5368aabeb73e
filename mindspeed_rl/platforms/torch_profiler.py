"""The profiler of PyTorch, for CPU and CUDA."""

from __future__ import annotations

import torch

from mindspeed_rl.platforms.base import ProfileRequest


class TorchProfiler:
    """A profiler of one window, whose :meth:`stop` writes a Chrome trace.

    Args:
        request: What to record, and where to write it.
        cuda: Whether to record CUDA kernels as well.
    """

    def __init__(self, request: ProfileRequest, *, cuda: bool) -> None:
        activity = torch.profiler.ProfilerActivity
        self._request = request
        self._profiler = torch.profiler.profile(
            activities=[activity.CPU, activity.CUDA] if cuda else [activity.CPU],
            record_shapes=request.record_shapes,
            profile_memory=request.with_memory,
            with_stack=request.with_stack,
        )

    def start(self) -> None:
        self._profiler.start()

    def stop(self, window: str) -> None:
        """Write ``<worker>_<window>.pt.trace.json``."""
        self._profiler.stop()
        name = f"{self._request.worker}_{window}.pt.trace.json"
        self._profiler.export_chrome_trace(str(self._request.folder / name))
