"""Tells the layers of a built vLLM model which experts their rank holds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mindspeed_rl.weight_layouts.rollout import Slots

_LAYER = re.compile(r"\.layers\.(\d+)\.")


def place_experts(
    model: torch.nn.Module,
    layer_experts: Sequence[tuple[int, Slots]],
    position: int,
    num_positions: int,
) -> None:
    """Set the maps of some layers from experts to the stack of this rank. Local.

    Where a step gathers the tokens of all ranks, or all ranks have the same tokens, a rank computes
    those experts of a token that its map knows: the map is all that vLLM has to be told. It is
    changed in place, so that whoever keeps the tensor sees it.

    Args:
        model: vLLM's model.
        layer_experts: Layer, and the expert in each slot, slots in order of the positions.
        position: Position of this rank among the ranks that share the experts.
        num_positions: Number of these ranks.

    Raises:
        RuntimeError: The model has no map in one of the layers, or one of another size.
    """
    if not layer_experts:
        return
    of_layers = dict(_maps_of(model))
    for layer, slots in layer_experts:
        maps = of_layers.get(layer, [])
        if not maps or any(len(found) != len(slots) for found in maps):
            raise RuntimeError(
                f"layer {layer}: vLLM has no map of {len(slots)} experts that could be changed"
            )
        count = len(slots) // num_positions
        mine = list(slots[position * count : (position + 1) * count])
        for found in maps:
            found.fill_(-1)
            local = torch.arange(count, dtype=found.dtype, device=found.device)
            found[torch.tensor(mine, device=found.device)] = local


def _maps_of(model: torch.nn.Module) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Yield the maps of each layer: that of its kernel, and its loader's where that is another."""
    for name, module in model.named_modules():
        found: Any = getattr(module, "_expert_map", None)
        layer = _LAYER.search(f".{name}.")
        if isinstance(found, torch.Tensor) and layer:
            loading = module.expert_map_manager.expert_map
            yield int(layer[1]), [found] if loading is found else [found, loading]
