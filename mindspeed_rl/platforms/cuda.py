"""NVIDIA GPUs with NCCL."""

from __future__ import annotations

import os

import torch


class CudaPlatform:
    """One CUDA device per process; gloo beside NCCL for host tensors."""

    name = "cuda"
    backend = "cpu:gloo,cuda:nccl"

    def __init__(self) -> None:
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))

    def set_device(self) -> None:
        """Bind to ``LOCAL_RANK``."""
        torch.cuda.set_device(self.device)

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

    def install(self) -> None:
        """megatron-core runs on CUDA as it is."""
