"""The platform of NVIDIA GPUs with NCCL."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from mindspeed_rl.config.npu import NpuSetup
from mindspeed_rl.platforms.base import DeviceMemory, ProfileRequest
from mindspeed_rl.platforms.features import TransformerFeatures
from mindspeed_rl.platforms.torch_profiler import TorchProfiler


class CudaPlatform:
    """The platform of one CUDA device per process, with gloo besides NCCL for host tensors."""

    name = "cuda"
    backend = "cpu:gloo,cuda:nccl"
    shares_host_memory = False

    def __init__(self) -> None:
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        self._copy_stream: torch.cuda.Stream | None = None
        self.taken_bytes = 0

    def set_device(self) -> None:
        torch.cuda.set_device(self.device)
        self.taken_bytes = self.memory().used_bytes

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def rng_state(self) -> torch.Tensor | None:
        return torch.cuda.get_rng_state()

    def set_rng_state(self, state: torch.Tensor | None) -> None:
        if state is not None:
            torch.cuda.set_rng_state(state)

    def install(self, setup: NpuSetup | None = None) -> None:
        """megatron-core runs on CUDA without changes."""

    def transformer_features(self) -> TransformerFeatures:
        """Return Megatron's features, with those fusions whose packages are installed."""
        fusions = {"bias_activation_fusion", "bias_dropout_fusion"}
        if find_spec("transformer_engine"):
            fusions.add("apply_rope_fusion")
        if find_spec("fused_weight_gradient_mlp_cuda"):
            fusions.add("gradient_accumulation_fusion")
        return TransformerFeatures(
            frozenset(fusions),
            builds_on_device=True,
            frees_sent_outputs=True,
            overlaps_reduction=True,
            chooses_dispatcher=True,
        )

    def memory(self) -> DeviceMemory:
        """Ask the driver, because torch misses NCCL's buffers and memory that a pool has freed."""
        free, total = torch.cuda.mem_get_info(self.device)
        return DeviceMemory(total - free, free, total)

    def reset_peak_memory(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_memory(self) -> int:
        """Return the peak bytes of tensors, without caches of the allocator."""
        return int(torch.cuda.max_memory_allocated(self.device))

    def release_cached_memory(self) -> None:
        """Wait for streams, whose blocks cannot be freed, and empty the caching allocator."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def profiler(self, request: ProfileRequest) -> TorchProfiler:
        return TorchProfiler(request, cuda=True)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Allocate and register memory; torch's pinned allocator rounds up to powers of two."""
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        if num_bytes:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            address = buffer.data_ptr()
            torch.cuda.check_error(runtime.cudaHostRegister(address, num_bytes, 0))
            weakref.finalize(buffer, runtime.cudaHostUnregister, address).atexit = False
        return buffer

    @contextmanager
    def copies(self) -> Iterator[None]:
        """Run the block on a stream for copies alone, which is created at first use."""
        if self._copy_stream is None:
            self._copy_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copy_stream):
            yield

    def wait_for_copies(self) -> None:
        """Let the current stream wait for the copy stream."""
        if self._copy_stream is not None:
            torch.cuda.current_stream().wait_stream(self._copy_stream)
