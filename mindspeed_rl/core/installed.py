"""What is installed beside torch, without importing it."""

from __future__ import annotations

from importlib.util import find_spec


def resolve_platform(name: str) -> str:
    """``auto`` becomes ``npu`` where torch_npu is installed; CUDA or CPU only torch can tell."""
    return "npu" if name == "auto" and find_spec("torch_npu") else name


def has_mindspeed() -> bool:
    """Whether MindSpeed, whose adaptor makes megatron-core run on NPUs, can be imported."""
    return find_spec("mindspeed") is not None


def has_transformer_engine(platform: str) -> bool:
    """Whether megatron-core's Transformer Engine modules can be built on a platform.

    On NPUs MindSpeed's replacements stand in for them.
    """
    platform = resolve_platform(platform)
    if platform == "npu":
        return has_mindspeed()
    return platform != "cpu" and find_spec("transformer_engine") is not None
