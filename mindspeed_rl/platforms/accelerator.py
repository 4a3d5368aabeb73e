"""What CUDA devices and Ascend NPUs have in common: streams, a driver, a generator of their own."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mindspeed_rl.platforms.base import DeviceMemory


class AcceleratorPlatform:
    """The platform of one device per process, with gloo for tensors and objects on the host.

    Args:
        name: ``"cuda"`` or ``"npu"``.
        api: ``torch.cuda``, or torch_npu's module with the same functions.
    """

    shares_host_memory = False

    def __init__(self, name: str, api: Any) -> None:
        self._api = api
        self.device = torch.device(name, int(os.environ.get("LOCAL_RANK", "0")))
        self._copy_stream: Any = None
        self.taken_bytes = 0

    @property
    def device_name(self) -> str:
        return str(self._api.get_device_name(self.device))

    def set_device(self) -> None:
        self._api.set_device(self.device)
        self.taken_bytes = self.memory().used_bytes

    def synchronize(self) -> None:
        self._api.synchronize()

    def wait_for_computation(self) -> None:
        """Wait for the current stream alone."""
        self._api.current_stream().synchronize()

    def rng_state(self) -> torch.Tensor | None:
        state: torch.Tensor = self._api.get_rng_state()
        return state

    def set_rng_state(self, state: torch.Tensor | None) -> None:
        if state is not None:
            self._api.set_rng_state(state)

    def memory(self) -> DeviceMemory:
        """Ask the driver, because torch counts no buffers of communicators, but unmapped memory.

        The engine's sleep mode unmaps memory under addresses that torch still counts.
        """
        free, total = self._api.mem_get_info(self.device)
        return DeviceMemory(total - free, free, total)

    def reset_peak_memory(self) -> None:
        self._api.reset_peak_memory_stats(self.device)

    def peak_memory(self) -> int:
        """Return the peak bytes of tensors, without caches of the allocator."""
        return int(self._api.max_memory_allocated(self.device))

    def release_cached_memory(self) -> None:
        """Wait for streams, whose blocks cannot be freed, and empty the caching allocator."""
        gc.collect()
        self._api.synchronize()
        self._api.empty_cache()

    @contextmanager
    def copies(self) -> Iterator[None]:
        """Run the block on a stream for copies alone, which is created at first use."""
        if self._copy_stream is None:
            self._copy_stream = self._api.Stream(self.device)
        self._copy_stream.wait_stream(self._api.current_stream())
        with self._api.stream(self._copy_stream):
            yield

    def wait_for_copies(self) -> None:
        """Let the current stream wait for the copy stream."""
        if self._copy_stream is not None:
            self._api.current_stream().wait_stream(self._copy_stream)
