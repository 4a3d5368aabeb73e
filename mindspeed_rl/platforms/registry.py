"""Which platform this process runs on: chosen once."""

from __future__ import annotations

import torch

from mindspeed_rl.platforms.base import Platform

_CURRENT: list[Platform] = []


def select_platform(name: str = "auto") -> Platform:
    """The platform of this process.

    Args:
        name: ``"auto"`` (CUDA when torch sees one, else CPU), ``"cpu"`` or ``"cuda"``.

    Raises:
        ValueError: the device is not there.
        RuntimeError: another platform is already in use, or there is none of that name.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if _CURRENT:
        if _CURRENT[0].name != name:
            raise RuntimeError(f"platform {name}: this process already runs on {_CURRENT[0].name}")
        return _CURRENT[0]
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--platform cuda: torch sees no CUDA device; allowed here: cpu")
    _CURRENT.append(_make(name))
    return _CURRENT[0]


def _make(name: str) -> Platform:
    if name == "cpu":
        from mindspeed_rl.platforms.cpu import CpuPlatform

        return CpuPlatform()
    if name == "cuda":
        from mindspeed_rl.platforms.cuda import CudaPlatform

        return CudaPlatform()
    raise RuntimeError(f"platform {name}: there are auto, cpu, cuda")
