"""The platform of CPUs with gloo, which is complete and is used on laptops and in CI."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from mindspeed_rl.config.diagnostics import ProfilerConfig
from mindspeed_rl.config.npu import NpuSetup
from mindspeed_rl.platforms import host_memory
from mindspeed_rl.platforms.base import DeviceMemory
from mindspeed_rl.platforms.features import TransformerFeatures
from mindspeed_rl.platforms.gloo_device import share_devices
from mindspeed_rl.platforms.host_memory import field_bytes
from mindspeed_rl.platforms.host_pages import advise_large_pages, give_back_free_pages
from mindspeed_rl.platforms.torch_profiler import TorchProfiler

_PAGE_BYTES = 4096
_STATM = Path("/proc/self/statm")
_MEMINFO = Path("/proc/meminfo")


class CpuPlatform:
    """The platform of CPUs, where torch's global generator is the device generator."""

    name = "cpu"
    backend = "gloo"
    shares_host_memory = True
    taken_bytes = 0
    device_name = "cpu"

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def set_device(self) -> None:
        """Use one compute thread unless ``OMP_NUM_THREADS`` says more, and one network thread."""
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        share_devices()

    def synchronize(self) -> None:
        """Do nothing, because a CPU has no queue of work to wait for."""

    def wait_for_computation(self) -> None:
        """Do nothing, for the same reason."""

    def rng_state(self) -> torch.Tensor | None:
        return None

    def set_rng_state(self, state: torch.Tensor | None) -> None:
        """Do nothing, because a CPU has no generator beyond torch's own."""

    def install(self, setup: NpuSetup | None = None) -> None:
        """Make megatron-core's modules take the CPU for their accelerator."""
        from mindspeed_rl.platforms import cpu_install

        cpu_install.install()

    def transformer_features(self) -> TransformerFeatures:
        """Return no features: a CPU has no fused kernels and no stream to overlap on.

        gloo's threads may still be sending an output when it is freed, which gives wrong losses.
        """
        return TransformerFeatures()

    def memory(self) -> DeviceMemory:
        """Return the memory of this process and its machine (Linux); zeros without a /proc."""
        if not _STATM.exists():
            return DeviceMemory(0, 0, 0)
        resident = int(_STATM.read_bytes().split()[1]) * _PAGE_BYTES
        text = _MEMINFO.read_bytes()
        available, total = field_bytes(b"MemAvailable:", text), field_bytes(b"MemTotal:", text)
        return DeviceMemory(resident, available, total)

    def reset_peak_memory(self) -> None:
        host_memory.reset_peak_bytes()

    def peak_memory(self) -> int:
        """Return the peak resident size of the process."""
        return host_memory.peak_bytes()

    def release_cached_memory(self) -> None:
        """Make the C library return free pages to the system."""
        give_back_free_pages()

    def profiler(self, config: ProfilerConfig, folder: Path, worker: str) -> TorchProfiler:
        return TorchProfiler(config, folder, worker, cuda=False)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Allocate plain memory, because pinning would speed nothing up."""
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        advise_large_pages(buffer.data_ptr(), num_bytes)
        return buffer

    def copies(self) -> AbstractContextManager[None]:
        """Return an empty context: copies on a CPU are synchronous."""
        return nullcontext()

    def wait_for_copies(self) -> None:
        """Do nothing, because copies on a CPU are done when their call returns."""
