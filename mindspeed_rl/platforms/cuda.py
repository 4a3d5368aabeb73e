"""The platform of NVIDIA GPUs with NCCL."""

from __future__ import annotations

import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from mindspeed_rl.config.diagnostics import ProfilerConfig
from mindspeed_rl.config.npu import NpuSetup
from mindspeed_rl.platforms.accelerator import AcceleratorPlatform
from mindspeed_rl.platforms.cached_memory import free_ranges
from mindspeed_rl.platforms.features import TransformerFeatures
from mindspeed_rl.platforms.torch_profiler import TorchProfiler


def free_blocks() -> list[range]:
    """Return the addresses of cached memory that no tensor has, in all pools of the process."""
    snapshot: Any = torch.cuda.memory_snapshot
    return free_ranges(snapshot())


def why_unseen() -> str:
    """Return in one line why torch sees no GPU, and what to do. Local.

    Torch tells apart a build without CUDA, a missing driver and one that is too old only when it is
    initialised.
    """
    built_for = torch.version.cuda
    if built_for is None:
        plain = torch.__version__.partition("+")[0]
        return (
            f"torch {torch.__version__} is a build without CUDA; pip install --force-reinstall "
            f"'torch=={plain}' from the default index, or use --platform cpu"
        )
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        said = str(error).strip().partition("\n")[0].partition(" Please ")[0].rstrip(".")
        fix = "nvidia-smi shows the state of driver and devices"
        if "too old" in said:
            fix = f"update the driver, or install a torch built for less than CUDA {built_for}"
        elif "no NVIDIA driver" in said:
            fix = "install it; in a container pass the devices (--gpus all)"
        return f"torch {torch.__version__} sees no GPU: {said}; {fix}"
    return (
        f"torch {torch.__version__} sees no GPU; nvidia-smi shows the devices, and "
        "CUDA_VISIBLE_DEVICES chooses among them"
    )


class CudaPlatform(AcceleratorPlatform):
    """The platform of one CUDA device per process, with gloo besides NCCL for host tensors."""

    name = "cuda"
    backend = "cpu:gloo,cuda:nccl"

    def __init__(self) -> None:
        super().__init__(self.name, torch.cuda)

    def install(self, setup: NpuSetup | None = None) -> None:
        """Do nothing, because megatron-core runs on CUDA without changes."""

    def transformer_features(self) -> TransformerFeatures:
        """Return Megatron's features, with those fusions whose packages are installed."""
        fusions = {"bias_activation_fusion", "bias_dropout_fusion"}
        if find_spec("transformer_engine"):
            fusions |= {"apply_rope_fusion", "moe_permute_fusion"}
        if find_spec("fused_weight_gradient_mlp_cuda"):
            fusions.add("gradient_accumulation_fusion")
        return TransformerFeatures(
            frozenset(fusions),
            builds_on_device=True,
            frees_sent_outputs=True,
            overlaps_reduction=True,
            overlaps_shared_experts=True,
            chooses_dispatcher=True,
            exchanges_uneven_pieces=True,
            packed_attention="varlen",
        )

    def profiler(self, config: ProfilerConfig, folder: Path, worker: str) -> TorchProfiler:
        return TorchProfiler(config, folder, worker, cuda=True)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Allocate and register memory; torch's pinned allocator rounds up to powers of two."""
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        if num_bytes:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            address = buffer.data_ptr()
            torch.cuda.check_error(runtime.cudaHostRegister(address, num_bytes, 0))
            weakref.finalize(buffer, runtime.cudaHostUnregister, address).atexit = False
        return buffer
