"""NVIDIA GPUs with NCCL."""

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
    """One CUDA device per process; gloo beside NCCL for host tensors."""

    name = "cuda"
    backend = "cpu:gloo,cuda:nccl"
    shares_host_memory = False

    def __init__(self) -> None:
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        self._copy_stream: torch.cuda.Stream | None = None
        self.taken_bytes = 0

    def set_device(self) -> None:
        """Bind to ``LOCAL_RANK``."""
        torch.cuda.set_device(self.device)
        self.taken_bytes = self.memory().used_bytes

    def synchronize(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize()

    def rng_state(self) -> torch.Tensor | None:
        """CUDA generator state."""
        return torch.cuda.get_rng_state()

    def set_rng_state(self, state: torch.Tensor | None) -> None:
        """Restore the CUDA generator."""
        if state is not None:
            torch.cuda.set_rng_state(state)

    def install(self, setup: NpuSetup | None = None) -> None:
        """megatron-core runs on CUDA as it is."""

    def transformer_features(self) -> TransformerFeatures:
        """Megatron's own, as far as the packages that they come from are installed."""
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
        """Of the driver: torch counts neither NCCL's buffers nor what a memory pool gave away."""
        free, total = torch.cuda.mem_get_info(self.device)
        return DeviceMemory(total - free, free, total)

    def reset_peak_memory(self) -> None:
        """Of the caching allocator."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_memory(self) -> int:
        """What tensors take, caches of the allocator aside."""
        return int(torch.cuda.max_memory_allocated(self.device))

    def release_cached_memory(self) -> None:
        """Wait, then empty the caching allocator: a block in use by a stream cannot leave."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def profiler(self, request: ProfileRequest) -> TorchProfiler:
        """PyTorch's, with kernels."""
        return TorchProfiler(request, cuda=True)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Pinned as it is: torch's own allocator of pinned memory rounds up to powers of two."""
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        if num_bytes:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            address = buffer.data_ptr()
            torch.cuda.check_error(runtime.cudaHostRegister(address, num_bytes, 0))
            weakref.finalize(buffer, runtime.cudaHostUnregister, address).atexit = False
        return buffer

    @contextmanager
    def copies(self) -> Iterator[None]:
        """A stream for copies alone, made at first use."""
        if self._copy_stream is None:
            self._copy_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copy_stream):
            yield

    def wait_for_copies(self) -> None:
        """The present stream waits for the copy stream."""
        if self._copy_stream is not None:
            torch.cuda.current_stream().wait_stream(self._copy_stream)
