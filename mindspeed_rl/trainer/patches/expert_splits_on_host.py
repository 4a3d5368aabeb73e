"""Gives the expert all-to-all its sizes as numbers if tensors are on the host already.

Why: the token dispatcher turns its split sizes into numpy arrays while it moves them from the
device; on CPU it moves nothing, so all_to_all_single gets tensors as sizes (TypeError).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed_rl.core.patching import Patch, apply_patch


def apply() -> None:
    """Make ``maybe_move_tensor_to_cpu`` convert host tensors, too. Idempotent."""
    apply_patch(
        Patch(
            target="megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",
            parameters=("tensor", "as_numpy", "record_stream"),
            make=_also_on_host,
            why="split sizes stay tensors on CPU",
            upstream="megatron/core/transformer/moe/moe_utils.py",
            versions="megatron-core 0.16.1",
            remove_when="the function honours as_numpy for host tensors",
        )
    )


def _also_on_host(original: Callable[..., Any]) -> Callable[..., Any]:
    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor) and tensor.device.type == "cpu":
            return tensor.numpy()
        return original(tensor, as_numpy, record_stream)

    return move
