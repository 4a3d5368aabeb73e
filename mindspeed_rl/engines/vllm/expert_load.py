"""Counts on the device how many tokens the routers of a built vLLM model send to each expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch


class ExpertLoad:
    """The tokens of each expert since they were last taken. Local.

    A router counts the tokens that it sees: those of its rank, or of all ranks where they are
    gathered first. Every token is thus counted equally often in all layers. Rows that fill up a
    step of data-parallel ranks are computed and count as well; they hold what ran before.

    Args:
        model: vLLM's model.
        layers: Numbers of the layers with experts.
        num_experts: Experts of a layer.
        device: Device of the model.

    Raises:
        RuntimeError: A layer has no router with a hook.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        layers: Sequence[int],
        num_experts: int,
        device: torch.device,
    ) -> None:
        self._counts = torch.zeros(len(layers), num_experts, dtype=torch.int64, device=device)
        routers = dict(_routers_of(model))
        for row, layer in enumerate(layers):
            if layer not in routers:
                raise RuntimeError(f"layer {layer}: vLLM has no router with a hook to count")
            router = routers[layer]
            router.set_capture_fn(partial(self._add, row, router.capture_fn))

    def _add(
        self, row: int, further: Callable[[torch.Tensor], None] | None, chosen: torch.Tensor
    ) -> None:
        """Count the experts of some tokens, without waiting for the device."""
        ids = chosen.flatten().long()
        self._counts[row].scatter_add_(0, ids, torch.ones_like(ids))
        if further is not None:
            further(chosen)

    def take(self) -> torch.Tensor:
        """Return the counts, [layers, experts] int64 on the host, and begin anew."""
        counts = self._counts.cpu().clone()
        self._counts.zero_()
        return counts


def _routers_of(model: torch.nn.Module) -> Iterator[tuple[int, Any]]:
    for module in model.modules():
        router = getattr(module, "router", None)
        if hasattr(router, "set_capture_fn"):
            yield int(module.layer_id), router  # type: ignore[arg-type]
