"""Moves and counts the experts of a built vLLM-Ascend model, by the slots that they are in.

vLLM-Ascend dispatches tokens by slots: the first of them are of the first rank, and so on. Where a
layer has a table (``log2phy``) it looks up the slot of every expert that a router has chosen. It
makes tables only for maps from a file; here every layer has one, that of neighbouring experts at
first, before graphs are captured. A table is changed in place, so that graphs go on with it. What
vLLM-Ascend keeps beside it (``_expert_map``) stays that of neighbouring experts, because its
all-gather looks up slots there, not experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from mindspeed_rl.core.patching import Patch, apply_patch
from mindspeed_rl.vllm_patches.step_sync import import_worker
from mindspeed_rl.weight_layouts.rollout import RolloutLayout, Slots

_LAYER = re.compile(r"\.layers\.(\d+)\.")


def apply() -> None:
    """Give every layer with experts a table of slots, before the engine is built. Idempotent."""
    import_worker()
    apply_patch(_TABLES)


def with_table(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that sets up the experts of a layer, with a table where it makes none."""

    def init_eplb_config(*args: Any, **options: Any) -> tuple[Any, Any, Any, int]:
        everywhere, mine, table, copies = original(*args, **options)
        if table is None and mine is not None:
            table = torch.arange(len(mine), dtype=torch.int32, device=mine.device)
        return everywhere, mine, table, copies

    return init_eplb_config


def place_experts(
    model: torch.nn.Module,
    layer_experts: Sequence[tuple[int, Slots]],
    position: int,
    num_positions: int,
) -> None:
    """Set the tables of some layers from experts to slots. Local, and alike on all ranks.

    Args:
        model: vLLM-Ascend's model, built after :func:`apply`.
        layer_experts: Layer, and the expert in each slot.
        position: Not used; see :func:`mindspeed_rl.engines.vllm.expert_maps.place_experts`.
        num_positions: Not used.

    Raises:
        RuntimeError: A layer has no table, or one of another size.
    """
    layers = dict(_layers_of(model)) if layer_experts else {}
    for layer, slots in layer_experts:
        table = getattr(layers.get(layer), "log2phy", None)
        if table is None or len(table) != len(slots):
            raise RuntimeError(
                f"layer {layer}: vLLM-Ascend has no table of {len(slots)} experts that could be "
                "changed"
            )
        order = torch.tensor(slots, device=table.device)
        table[order] = torch.arange(len(slots), dtype=table.dtype, device=table.device)


class ComputedExperts:
    """The tokens that this rank has computed for its experts since they were last taken. Local.

    They are those that the dispatch brings to a rank: each token counts once for each of its
    experts, on the rank that has the expert. Rows that fill up a batch count, and rows that a rank
    without requests computes to keep step with others, unless the dispatch leaves them out.

    Args:
        model: vLLM-Ascend's model.
        layers: Numbers of the layers with experts.
        layout: Layout of the engines.
        rank: This rank of the world.
        device: Device of the model.

    Raises:
        RuntimeError: A layer has no table of slots.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        layers: Sequence[int],
        layout: RolloutLayout,
        rank: int,
        device: torch.device,
    ) -> None:
        self._experts, per_rank = layout.spec.num_experts, layout.experts_per_rank
        first = layout.engine.expert_rank(rank) * per_rank
        self._mine = slice(first, first + per_rank)
        self._counts = torch.zeros(len(layers), per_rank, dtype=torch.int64, device=device)
        found = dict(_layers_of(model))
        for row, layer in enumerate(layers):
            if getattr(found.get(layer), "log2phy", None) is None:
                raise RuntimeError(f"layer {layer}: vLLM-Ascend has no experts whose tokens count")
            method = found[layer].quant_method
            method.apply = partial(self._counting, row, method.apply)
        self._tables = [found[layer].log2phy for layer in layers]

    def _counting(self, row: int, apply: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Compute experts, and count their tokens without waiting for the device."""
        result = apply(*args, **options)
        tokens = result.expert_tokens
        if result.group_list_type == 0:  # the sum up to each expert
            tokens = torch.diff(tokens, prepend=tokens.new_zeros(1))
        self._counts[row].add_(tokens)
        return result

    def take(self) -> torch.Tensor:
        """Return the counts, [layers, experts] int64 on the host, and begin anew.

        To be called before experts move.
        """
        counts = torch.zeros(len(self._tables), self._experts, dtype=torch.int64)
        for row, (table, mine) in enumerate(zip(self._tables, self._counts.cpu(), strict=True)):
            counts[row, experts_by_slot(table.cpu())[self._mine]] = mine
        self._counts.zero_()
        return counts


def experts_by_slot(table: torch.Tensor) -> torch.Tensor:
    """Return the expert in each slot, from the slot of each expert."""
    return torch.argsort(table)


def _layers_of(model: torch.nn.Module) -> Iterator[tuple[int, Any]]:
    for name, module in model.named_modules():
        layer = _LAYER.search(f".{name}.")
        if layer and hasattr(module, "log2phy"):
            yield int(layer[1]), module


_TABLES = Patch(
    target="vllm_ascend.ops.fused_moe.fused_moe_0_23_0:init_eplb_config",
    parameters=(
        *("eplb_config", "layer_id", "moe_config", "mix_placement", "num_shared_experts"),
        "tp_size",
    ),
    make=with_table,
    why="a layer without a map of its experts has no table in which they could move",
    upstream="vllm_ascend/eplb/core/eplb_utils.py, init_eplb_config",
    versions="vllm-ascend 0.23.0, 0.23.0.post1",
    remove_when="vLLM-Ascend lets its tables be set without a file and without dynamic EPLB",
)
