"""The platform of Ascend NPUs with HCCL, through torch_npu."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mindspeed_rl.config.npu import NpuSetup
from mindspeed_rl.platforms.base import DeviceMemory, Profiler, ProfileRequest
from mindspeed_rl.platforms.features import TransformerFeatures


class NpuPlatform:
    """The platform of one NPU per process, with gloo besides HCCL for host tensors and objects."""

    name = "npu"
    backend = "cpu:gloo,npu:hccl"
    shares_host_memory = False

    def __init__(self) -> None:
        import torch_npu

        self._npu: Any = torch_npu.npu
        self.device = torch.device("npu", int(os.environ.get("LOCAL_RANK", "0")))
        self._copy_stream: Any = None
        self.taken_bytes = 0

    def set_device(self) -> None:
        self._npu.set_device(self.device)
        self.taken_bytes = self.memory().used_bytes

    def synchronize(self) -> None:
        self._npu.synchronize()

    def rng_state(self) -> torch.Tensor | None:
        state: torch.Tensor = self._npu.get_rng_state()
        return state

    def set_rng_state(self, state: torch.Tensor | None) -> None:
        if state is not None:
            self._npu.set_rng_state(state)

    def install(self, setup: NpuSetup | None = None) -> None:
        """Apply MindSpeed, or torch_npu's replacement of CUDA where it is not installed."""
        from mindspeed_rl.platforms import npu_install

        npu_install.install(setup or NpuSetup())

    def transformer_features(self) -> TransformerFeatures:
        """Return all features but fusions; MindSpeed's modules and flags bring fused kernels."""
        return TransformerFeatures(
            builds_on_device=True,
            frees_sent_outputs=True,
            overlaps_reduction=True,
            chooses_dispatcher=True,
        )

    def memory(self) -> DeviceMemory:
        """Ask the driver, because torch counts no buffers of HCCL, but counts unmapped memory.

        vLLM-Ascend's sleep mode unmaps memory under addresses that torch still counts.
        """
        free, total = self._npu.mem_get_info(self.device)
        return DeviceMemory(total - free, free, total)

    def reset_peak_memory(self) -> None:
        self._npu.reset_peak_memory_stats(self.device)

    def peak_memory(self) -> int:
        """Return the peak bytes of tensors, without caches of the allocator."""
        return int(self._npu.max_memory_allocated(self.device))

    def release_cached_memory(self) -> None:
        """Wait for streams, whose blocks cannot be freed, and empty the caching allocator."""
        gc.collect()
        self._npu.synchronize()
        self._npu.empty_cache()

    def profiler(self, request: ProfileRequest) -> Profiler:
        from mindspeed_rl.platforms.npu_profiler import NpuProfiler

        return NpuProfiler(request)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    @contextmanager
    def copies(self) -> Iterator[None]:
        """Run the block on a stream for copies alone, which is created at first use."""
        if self._copy_stream is None:
            self._copy_stream = self._npu.Stream(self.device)
        self._copy_stream.wait_stream(self._npu.current_stream())
        with self._npu.stream(self._copy_stream):
            yield

    def wait_for_copies(self) -> None:
        """Let the current stream wait for the copy stream."""
        if self._copy_stream is not None:
            self._npu.current_stream().wait_stream(self._copy_stream)


def memory_format(tensor: torch.Tensor) -> int:
    """Return the memory format of an NPU tensor as a number of CANN (2: ND, 29: fractal NZ)."""
    return int(torch.ops.npu.get_npu_format(tensor))
