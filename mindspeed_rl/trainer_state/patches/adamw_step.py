"""Lets the distributed optimizer load a checkpoint into torch's AdamW.

Why: it copies every entry of a parameter's optimizer state from the checkpoint. Torch's AdamW,
which is used without Transformer Engine and Apex, keeps its step count there, too; the checkpoint
has one step for all parameters and restores it on another path. Without this patch the load ends in
``KeyError: 'step'``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_rl.core.patching import Patch, apply_patch


def apply() -> None:
    """Make the copy use the step that the parameter already has. Idempotent."""
    apply_patch(
        Patch(
            target=(
                "megatron.core.optimizer.distrib_optimizer:"
                "DistributedOptimizer._set_main_param_and_optimizer_states"
            ),
            parameters=("self", "model_param", "tensors"),
            make=_with_step,
            why="torch's AdamW keeps its step count in the parameter's state",
            upstream="megatron/core/optimizer/distrib_optimizer.py",
            versions="megatron-core 0.16.1",
            remove_when="megatron-core leaves step out of that copy",
        )
    )


def _with_step(original: Callable[..., None]) -> Callable[..., None]:
    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        original(
            self, model_param, {"step": state["step"], **tensors} if "step" in state else tensors
        )

    return set_states
