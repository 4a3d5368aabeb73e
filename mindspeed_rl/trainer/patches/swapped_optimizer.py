"""Lets checkpoints save and load the optimizer state that MindSpeed keeps on the host.

Why: with ``--swap-optimizer`` MindSpeed puts a class of its own in the place of megatron-core's
distributed optimizer. It was written for an older megatron-core:

- its method that gathers the state lacks the arguments that megatron-core 0.16.1 gives it, and
  needs a gloo group that the optimizer is built without;
- megatron-core's methods that read and write the state of a parameter see the device's tensors,
  whose memory is given back between updates;
- its update keeps the step of a group as a tensor of the device. megatron-core compares steps,
  finds two equal tensors unequal, and writes one number back, which the update cannot take;
- its update reads hyperparameters and steps from groups that it listed when it was built. A load
  replaces the groups, and learning rates and steps would not change any more.

The copies of an update are queued on streams of MindSpeed's. Whoever reads or writes the state
waits for the device first (:meth:`mindspeed_rl.platforms.base.Platform.synchronize`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.optimizer import distrib_optimizer

from mindspeed_rl.core.patching import Patch, apply_patch

_STATE = ("param", "exp_avg", "exp_avg_sq")
_VERSIONS = "MindSpeed core_r0.16.0, megatron-core 0.16.1"
_MINDSPEED = "mindspeed/core/optimizer/swap_optimizer/swap_optimizer.py"


def is_used() -> bool:
    """Whether MindSpeed's class is in the place of megatron-core's distributed optimizer."""
    module: str = distrib_optimizer.DistributedOptimizer.__module__
    return module.startswith("mindspeed.")


def apply() -> None:
    """Mend MindSpeed's class before an optimizer is built. Idempotent; without it no effect."""
    if is_used():
        for patch in _patches():
            apply_patch(patch)


def _patches() -> tuple[Patch, ...]:
    return (
        Patch(
            target=(
                "mindspeed.core.optimizer.swap_optimizer.swap_optimizer:"
                "SwapDistributedOptimizer.get_parameter_state_dp_zero"
            ),
            parameters=("self",),
            make=_gathered_by_megatron,
            why="megatron-core calls it with arguments that it does not have",
            upstream=_MINDSPEED,
            versions=_VERSIONS,
            remove_when="MindSpeed's method takes them and works without a gloo group",
        ),
        Patch(
            target=(
                "megatron.core.optimizer.distrib_optimizer:"
                "DistributedOptimizer._get_main_param_and_optimizer_states"
            ),
            parameters=("self", "model_param"),
            make=lambda original: _state,
            why="between updates the state is on the host, and the device's tensors have no memory",
            upstream=_MINDSPEED,
            versions=_VERSIONS,
            remove_when="MindSpeed overrides it",
        ),
        Patch(
            target=(
                "megatron.core.optimizer.distrib_optimizer:"
                "DistributedOptimizer._set_main_param_and_optimizer_states"
            ),
            parameters=("self", "model_param", "tensors"),
            make=lambda original: _set_state,
            why="between updates the state is on the host, and the device's tensors have no memory",
            upstream=_MINDSPEED,
            versions=_VERSIONS,
            remove_when="MindSpeed overrides it",
        ),
        Patch(
            target="mindspeed.core.optimizer.adamw:AdamW.step",
            parameters=("self", "closure"),
            make=_with_counted_steps,
            why="it needs steps as tensors and groups as they were built; checkpoints need numbers "
            "and replace the groups",
            upstream=_MINDSPEED,
            versions=_VERSIONS,
            remove_when="MindSpeed's update takes numbers and reads the groups of the optimizer",
        ),
    )


def _gathered_by_megatron(original: Callable[..., Any]) -> Callable[..., Any]:
    base: Any = distrib_optimizer.DistributedOptimizer.__base__
    gather: Callable[..., Any] = base.get_parameter_state_dp_zero
    return gather


def _state(optimizer: Any, model_param: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return master weight and moments where they are: on the host between updates.

    The master weight of a parameter in fp32 is the parameter itself and stays on the device.
    """
    group, order = optimizer.model_param_group_index_map[model_param]
    param = optimizer.optimizer.param_groups[group]["params"][order]
    on_device = {"param": param, **optimizer.optimizer.state[param]}
    on_host = optimizer.param_to_cpu_states_map[param]
    return {
        key: on_device[key] if on_device[key].untyped_storage().nbytes() else on_host[key]
        for key in _STATE
    }


def _set_state(
    optimizer: Any, model_param: torch.Tensor, tensors: Mapping[str, torch.Tensor]
) -> None:
    for key, target in _state(optimizer, model_param).items():
        target.copy_(tensors[key])


def _with_counted_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        """Update with the groups as they are now, whose steps are numbers before and after."""
        self.param_to_group_map = {p: group for group in self.param_groups for p in group["params"]}
        counts = [int(group.get("step", 0)) for group in self.param_groups]
        loss = None
        if self.param_to_group_map:
            device = next(iter(self.param_to_group_map)).device
            for group, count in zip(self.param_groups, counts, strict=True):
                group["step"] = torch.full((), count, dtype=torch.int64, device=device)
            loss = original(self, closure)
        for group, count in zip(self.param_groups, counts, strict=True):
            group["step"] = count + 1
        return loss

    return step
