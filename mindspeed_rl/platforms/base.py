"""The interface of a device platform, as the rest of the code uses it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from mindspeed_rl.config.diagnostics import ProfilerConfig
from mindspeed_rl.config.npu import NpuSetup
from mindspeed_rl.platforms.features import TransformerFeatures


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of the device as its driver sees it, in bytes.

    Attributes:
        used_bytes: Bytes in use by torch's allocator with its caches, other pools (the engine's),
            communicators, libraries, and other processes, which drivers do not tell apart. On a
            host: bytes of this process.
        free_bytes: Bytes that a further allocation may take.
        total_bytes: Bytes of the device.
    """

    used_bytes: int
    free_bytes: int
    total_bytes: int


class Profiler(Protocol):
    """A profiler that records one window of steps."""

    def start(self) -> None:
        """Start to record this process."""

    def stop(self, window: str) -> None:
        """Stop and write the trace, with ``window`` in its name where the profiler allows it."""


class Platform(Protocol):
    """A kind of device.

    Attributes:
        name: Name of the platform, ``"cpu"``, ``"cuda"`` or ``"npu"``.
        backend: Argument of ``torch.distributed.init_process_group``.
        device: Device on which this process computes.
        shares_host_memory: Whether device memory is host memory, so that offloading frees nothing.
        taken_bytes: Bytes of the device in use before this process: by its driver and by others.
        device_name: The driver's name of the device's model, such as ``"Ascend910B3"``.
    """

    name: str
    backend: str
    device: torch.device
    shares_host_memory: bool
    taken_bytes: int

    @property
    def device_name(self) -> str: ...

    def set_device(self) -> None:
        """Bind this process to its device (by ``LOCAL_RANK``) and set ``taken_bytes``."""

    def synchronize(self) -> None:
        """Wait for all queued work of the device."""

    def wait_for_computation(self) -> None:
        """Wait for the work that is queued for computation; queued copies may go on."""

    def rng_state(self) -> torch.Tensor | None:
        """Return the state of the device generator; ``None`` when it is torch's own."""

    def set_rng_state(self, state: torch.Tensor | None) -> None:
        """Restore a state that :meth:`rng_state` returned."""

    def install(self, setup: NpuSetup | None = None) -> None:
        """Make megatron-core usable on this device; idempotent.

        Args:
            setup: Settings of an NPU process; other platforms ignore them.
        """

    def transformer_features(self) -> TransformerFeatures:
        """Return the features that megatron-core may use on this device."""

    def memory(self) -> DeviceMemory:
        """Return the device's memory as its driver sees it now."""

    def reset_peak_memory(self) -> None:
        """Start another interval of :meth:`peak_memory`."""

    def peak_memory(self) -> int:
        """Return the peak bytes since the last reset: of tensors, on a host of the process.

        0 where the system does not report it.
        """

    def release_cached_memory(self) -> None:
        """Give memory that the allocator caches back to the device."""

    def profiler(self, config: ProfilerConfig, folder: Path, worker: str) -> Profiler:
        """Create a profiler of the device, which is not started yet.

        Args:
            config: What is recorded.
            folder: Folder of the traces.
            worker: Name of this process in the name of its trace.
        """

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Allocate [num_bytes] uint8 on the host, pinned where that makes copies asynchronous."""

    def copies(self) -> AbstractContextManager[None]:
        """Queue the copies of the block after all work queued now, in parallel to later work."""

    def wait_for_copies(self) -> None:
        """Let computation that is queued later wait for all queued copies; the host does not."""
