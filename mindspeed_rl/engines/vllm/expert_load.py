"""Counts on the device how many tokens the routers of a built vLLM model send to each expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from mindspeed_rl.expert_placement.counted_rows import counted_rows
from mindspeed_rl.weight_layouts.rollout import RolloutLayout


class ExpertLoad:
    """The tokens of each expert since they were last taken. Local.

    A token that an engine computes counts on one of its ranks, once in every layer: the sum over
    the ranks is exact. Rows that fill up a batch, or that a rank without requests computes to keep
    step with others, do not count; vLLM marks them before each step, in memory that graphs read.

    Args:
        model: vLLM's model.
        layers: Numbers of the layers with experts.
        layout: Layout of the engines.
        rank: This rank of the world.
        device: Device of the model.

    Raises:
        RuntimeError: A layer has no router with a hook.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        layers: Sequence[int],
        layout: RolloutLayout,
        rank: int,
        device: torch.device,
    ) -> None:
        self._engine, self._rank = layout.engine, rank
        sizes = (len(layers), layout.spec.num_experts)
        self._counts = torch.zeros(sizes, dtype=torch.int64, device=device)
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
        from vllm.forward_context import get_forward_context

        context: Any = get_forward_context()
        ranks, padding = context.dp_metadata, context.is_padding
        batches = ranks.num_tokens_across_dp_cpu.tolist() if ranks else ()
        shares = ranks.local_sizes or () if ranks else ()
        mine = counted_rows(len(chosen), len(padding), batches, shares, self._engine, self._rank)
        ids = chosen[mine.first : mine.first + mine.count]
        real = ~padding[mine.batch_first : mine.batch_first + mine.count]
        each = real.long().repeat_interleave(chosen.shape[1])
        self._counts[row].scatter_add_(0, ids.flatten().long(), each)
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
