"""The platform of Ascend NPUs with HCCL, through torch_npu."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from mindspeed_rl.config.diagnostics import ProfilerConfig
from mindspeed_rl.config.npu import NpuSetup
from mindspeed_rl.platforms.accelerator import AcceleratorPlatform
from mindspeed_rl.platforms.base import Profiler
from mindspeed_rl.platforms.features import TransformerFeatures
from mindspeed_rl.platforms.pinned_memory import pinned_buffer


class NpuPlatform(AcceleratorPlatform):
    """The platform of one NPU per process, with gloo besides HCCL for host tensors and objects."""

    name = "npu"
    backend = "cpu:gloo,npu:hccl"

    def __init__(self) -> None:
        import torch_npu

        super().__init__(self.name, torch_npu.npu)

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
            exchanges_uneven_pieces=True,
            packed_attention="tnd",
        )

    def profiler(self, config: ProfilerConfig, folder: Path, worker: str) -> Profiler:
        from mindspeed_rl.platforms.npu_profiler import NpuProfiler

        return NpuProfiler(config, folder, worker)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return pinned_buffer(num_bytes, self.synchronize)


def memory_format(tensor: torch.Tensor) -> int:
    """Return the memory format of an NPU tensor as a number of CANN (2: ND, 29: fractal NZ)."""
    return int(torch.ops.npu.get_npu_format(tensor))


def device_count() -> int:
    """Return the number of NPUs that CANN shows to this process. Local."""
    import torch_npu

    return int(torch_npu.npu.device_count())


def driver_code() -> int:
    """Return the driver's code for a count of the devices: 0, or why there is none. Local."""
    count = ctypes.c_int(0)
    return int(ctypes.CDLL("libascend_hal.so").drvGetDevNum(ctypes.byref(count)))
