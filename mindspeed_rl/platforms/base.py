"""What the rest of the code asks of a device: only what is called."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from mindspeed_rl.config.npu import NpuSetup
from mindspeed_rl.platforms.features import TransformerFeatures


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of the device as its driver sees it, in bytes.

    Attributes:
        used_bytes: of all that is in use: torch's allocator with its caches, pools beside it (the
            engine's), communicators, libraries, and other processes where there are any, which
            drivers do not tell apart. On a host: of this process.
        free_bytes: what a further allocation may take.
        total_bytes: of the device.
    """

    used_bytes: int
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """What a profiler records and where it goes.

    Attributes:
        folder: of the traces.
        worker: names the trace of this process.
        level: ``level0`` to ``level2`` of torch_npu's profiler; others have no use for it.
        with_stack: Python stacks of operators.
        with_memory: every allocation.
        record_shapes: shapes of inputs.
    """

    folder: Path
    worker: str
    level: str = "level0"
    with_stack: bool = False
    with_memory: bool = False
    record_shapes: bool = False


class Profiler(Protocol):
    """A profiler of one window."""

    def start(self) -> None:
        """Begin to record this process."""
        ...

    def stop(self, window: str) -> None:
        """End, and write the trace; ``window`` is part of its name where the profiler lets us."""
        ...


class Platform(Protocol):
    """A kind of device.

    Attributes:
        name: ``"cpu"``, ``"cuda"`` or ``"npu"``.
        backend: argument of ``torch.distributed.init_process_group``.
        device: where this process computes.
        shares_host_memory: device memory is host memory, so that offloading frees nothing.
        taken_bytes: of the device, in use when this process came: its driver, other processes.
    """

    name: str
    backend: str
    device: torch.device
    shares_host_memory: bool
    taken_bytes: int

    def set_device(self) -> None:
        """Bind this process to its device (by ``LOCAL_RANK``) and look what is taken of it."""
        ...

    def synchronize(self) -> None:
        """Wait for all queued work."""
        ...

    def rng_state(self) -> torch.Tensor | None:
        """State of the device generator; ``None`` when it is torch's own."""
        ...

    def set_rng_state(self, state: torch.Tensor | None) -> None:
        """Restore what :meth:`rng_state` gave."""
        ...

    def install(self, setup: NpuSetup | None = None) -> None:
        """Make megatron-core usable on this device; idempotent.

        Args:
            setup: what an NPU process is told; others have no use for it.
        """
        ...

    def transformer_features(self) -> TransformerFeatures:
        """What megatron-core may use here."""
        ...

    def memory(self) -> DeviceMemory:
        """What the driver says now."""
        ...

    def reset_peak_memory(self) -> None:
        """Begin another interval of :meth:`peak_memory`."""
        ...

    def peak_memory(self) -> int:
        """The most bytes since the last reset: of tensors, or of the process where it is the host.

        0 where the system does not tell.
        """
        ...

    def release_cached_memory(self) -> None:
        """Give memory that the allocator keeps for later back to the device."""
        ...

    def profiler(self, request: ProfileRequest) -> Profiler:
        """The device's profiler, not started."""
        ...

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8 on the host, pinned where that makes copies asynchronous."""
        ...

    def copies(self) -> AbstractContextManager[None]:
        """Copies within are queued beside the computation, after all that is queued now."""
        ...

    def wait_for_copies(self) -> None:
        """Computation queued from now on waits for all queued copies; the host does not."""
        ...
