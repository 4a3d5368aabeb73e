"""Chooses the platform of this process, once."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.platforms.base import Platform

_CURRENT: list[Platform] = []


def select_platform(name: str = "auto") -> Platform:
    """Return the platform of this process, creating it at the first call.

    Args:
        name: ``"auto"`` (NPU or CUDA when torch sees one, else CPU), ``"cpu"``, ``"cuda"`` or
            ``"npu"``.

    Raises:
        UsageError: torch sees no such device.
        RuntimeError: Another platform is already in use.
    """
    if name == "auto":
        name = next((n for n in ("npu", "cuda") if _sees(n)), "cpu")
    if _CURRENT:
        if _CURRENT[0].name != name:
            raise RuntimeError(f"platform {name}: this process already runs on {_CURRENT[0].name}")
        return _CURRENT[0]
    if name == "cuda" and not _sees(name):
        from mindspeed_rl.platforms.cuda import why_unseen

        raise UsageError(f"--platform cuda: {why_unseen()}")
    if name == "npu" and not _sees(name):
        raise UsageError(f"--platform {name}: torch sees no such device; allowed here: cpu")
    _CURRENT.append(_make(name))
    return _CURRENT[0]


def _sees(name: str) -> bool:
    """Whether torch sees a device; with MindSpeed applied this is true of CUDA on an NPU, too."""
    if name == "cuda":
        return torch.cuda.is_available()
    if find_spec("torch_npu") is None:
        return False
    import torch_npu

    return bool(torch_npu.npu.is_available())


def _make(name: str) -> Platform:
    if name == "cpu":
        from mindspeed_rl.platforms.cpu import CpuPlatform

        return CpuPlatform()
    if name == "cuda":
        from mindspeed_rl.platforms.cuda import CudaPlatform

        return CudaPlatform()
    from mindspeed_rl.platforms.npu import NpuPlatform

    return NpuPlatform()
