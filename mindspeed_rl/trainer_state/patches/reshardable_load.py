"""Lets MindSpeed's copy of a load read the optimizer state that this project saves.

Why: MindSpeed replaces ``DistributedOptimizer.load_state_dict`` by a copy of an older one, which
does not know megatron-core's format ``fully_reshardable`` and ends every load of an optimizer in
``NotImplementedError``. The method that reads that format is megatron-core's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from mindspeed_rl.core.patching import Patch, apply_patch

_FORMAT, _TENSORS = "param_state_sharding_type", "param_state"


def apply() -> None:
    """Make the load read that format. Idempotent; without MindSpeed no effect."""
    if not DistributedOptimizer.load_state_dict.__module__.startswith("mindspeed."):
        return
    apply_patch(
        Patch(
            target=(
                "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_state_dict"
            ),
            parameters=("self", "state_dict"),
            make=_with_reshardable,
            why="MindSpeed's replacement does not know the format fully_reshardable",
            upstream="mindspeed/core/megatron_basic/megatron_basic.py",
            versions="MindSpeed core_r0.16.0, megatron-core 0.16.1",
            remove_when="MindSpeed's replacement knows it, or is gone",
        )
    )


def _with_reshardable(original: Callable[..., None]) -> Callable[..., None]:
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        if state_dict.get(_FORMAT) != "fully_reshardable":
            original(self, state_dict)
            return
        original(self, {k: v for k, v in state_dict.items() if k not in (_FORMAT, _TENSORS)})
        self.load_parameter_state_from_fully_reshardable(state_dict[_TENSORS])

    return load_state_dict
