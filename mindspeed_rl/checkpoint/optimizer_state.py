"""The state of AdamW as megatron-core expects it when it saves and loads a checkpoint. Local."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_NO_PARAMETER = "no parameter of this rank"


def initialize_state(optimizers: Sequence[torch.optim.Optimizer], *, distributed: bool) -> None:
    """Give torch's AdamW its state before the first update, as the first update would.

    megatron-core reads the common step from that state when it saves and when it loads. The
    distributed optimizer of experts on a stage that has none, and of a share without parameters,
    gets the step of the others.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if not optimizer.state[param]:
                    optimizer.state[param] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(param),
                        "exp_avg_sq": torch.zeros_like(param),
                    }
    if distributed:
        _give_empty_optimizers_a_step(optimizers)


def _give_empty_optimizers_a_step(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Add a state that belongs to no parameter, as torch's optimizers allow."""
    steps = [
        state["step"]
        for optimizer in optimizers
        for param, state in optimizer.state.items()
        if isinstance(param, torch.Tensor) and "step" in state
    ]
    for optimizer in optimizers:
        if steps and not any(group["params"] for group in optimizer.param_groups):
            states: dict[Any, Any] = optimizer.state
            states[_NO_PARAMETER] = {"step": steps[0].clone()}


def share_common_step(state: dict[Any, Any]) -> None:
    """Give the step to the optimizer of experts on a stage that has none.

    Of what is no tensor rank 0's is saved, for the stages with experts, too. Only where the
    optimizer is not distributed: there the step is beside the state of the parameters.
    """
    states = _states_of(state)
    steps = [found["common_step"] for found in states if "common_step" in found]
    for found in states:
        if steps:
            found.setdefault("common_step", steps[0])


def _states_of(state: dict[Any, Any]) -> list[dict[Any, Any]]:
    """Return the states of the parameters of every chained optimizer that is not distributed."""
    chained = state.values() if all(isinstance(key, int) for key in state) else (state,)
    # In fp32 a part is torch's optimizer's own state dict.
    parts = (part.get("optimizer", part) for part in chained)
    return [part["state"] for part in parts if "state" in part]


def load_state(
    optimizer: Any, optimizers: Sequence[torch.optim.Optimizer], state: dict[Any, Any]
) -> None:
    """Load moments, master weights and step; hyperparameters keep the values of the flags.

    Args:
        optimizer: megatron-core's optimizer.
        optimizers: The optimizers of torch inside.
        state: What a checkpoint has of it.
    """
    flags = [
        [
            {k: v for k, v in group.items() if k not in ("params", "step")}
            for group in inner.param_groups
        ]
        for inner in optimizers
    ]
    restore_step_of_0(state)
    optimizer.load_state_dict(state)
    for inner, groups in zip(optimizers, flags, strict=True):
        for group, values in zip(inner.param_groups, groups, strict=True):
            group.update(values)
        for param_state in inner.state.values():
            # megatron-core gives all parameters one step tensor, which AdamW would advance once per
            # parameter.
            if "step" in param_state:  # MindSpeed's AdamW keeps one in each group of parameters
                param_state["step"] = param_state["step"].clone()


def restore_step_of_0(state: dict[Any, Any]) -> None:
    """Add the step to the state of parameters where it is 0, before the first update.

    megatron-core leaves it out of a checkpoint then, and torch's AdamW refuses a state without it.
    """
    for states in _states_of(state):
        if "common_step" not in states:
            for param_state in states.values():
                param_state.setdefault("step", torch.tensor(0.0))
