"""Reads a file that says which rank of an engine has which experts (``--rollout-expert-map``)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from operator import index
from pathlib import Path

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.weight_layouts.rollout import Slots


def read_expert_map(
    path: Path, layers: Sequence[int], num_experts: int, ep: int
) -> tuple[tuple[int, Slots], ...]:
    """Return for each layer with experts the expert in each slot, slots in order over the ranks.

    Args:
        path: JSON file as vLLM-Ascend has it, with ``layer_list[].device_list[].device_expert``;
            its layers are those with experts, in their order. Further ones, of heads that predict
            several tokens, are not read.
        layers: Numbers of the model's layers with experts, at least one.
        num_experts: Number of experts in a layer of the model.
        ep: Number of ranks that share the experts of a layer.

    Raises:
        UsageError: The file is no such map, or it is not for this model and ``ep``.
    """
    name = f"--rollout-expert-map {path}"
    try:
        placements = [
            [tuple(map(index, device["device_expert"])) for device in layer["device_list"]]
            for layer in json.loads(path.read_text())["layer_list"]
        ]
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        raise UsageError(
            f"{name}: not a map of experts ({type(error).__name__}: {error}); it needs "
            "layer_list, and device_list with device_expert in every layer"
        ) from error
    if len(placements) < len(layers):
        raise UsageError(
            f"{name}: it has {len(placements)} layers, and the model has {len(layers)} with "
            "experts; give a map of all of them"
        )
    found = list(zip(layers, placements[: len(layers)], strict=True))
    per_rank = len(found[0][1][0]) if found[0][1] else 0
    for layer, devices in found:
        slots = list(chain.from_iterable(devices))
        uneven = any(len(device) != per_rank for device in devices)
        if len(devices) != ep or uneven or set(slots) != set(range(num_experts)):
            raise UsageError(
                f"{name}: layer {layer} of the model has {len(devices)} devices with {len(slots)} "
                f"experts; needed are --rollout-ep {ep} devices with equally many in all layers, "
                f"among them each of the model's {num_experts} experts"
            )
    return tuple(
        (layer, tuple(e for device in devices for e in device)) for layer, devices in found
    )
