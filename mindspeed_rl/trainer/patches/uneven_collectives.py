"""Collectives of unequal pieces with gloo, which expert tensor parallelism needs.

Why: gloo's all-gather and reduce-scatter need equal sizes on all ranks; the numbers of an expert's
tokens differ between the ranks that share it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_rl.core.patching import Patch, apply_patch

_MODULE = "megatron.core.tensor_parallel.mappings"
_ABOUT: dict[str, Any] = {
    "why": "gloo wants equal sizes",
    "upstream": "megatron/core/tensor_parallel/mappings.py",
    "versions": "megatron-core 0.16.1",
    "remove_when": "gloo takes unequal sizes",
}


def apply() -> None:
    """Pad pieces for the gather; reduce everything and cut for the reduce-scatter. Idempotent."""
    apply_patch(
        Patch(
            target=f"{_MODULE}:_gather_along_first_dim",
            parameters=("input_", "group", "output_split_sizes", "use_global_buffer"),
            make=_padded_gather,
            **_ABOUT,
        )
    )
    apply_patch(
        Patch(
            target=f"{_MODULE}:_reduce_scatter_along_first_dim",
            parameters=("input_", "group", "input_split_sizes", "use_global_buffer"),
            make=_reduce_and_cut,
            **_ABOUT,
        )
    )


def _padded_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    def gather(
        input_: torch.Tensor, group: Any, output_split_sizes: Any = None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return original(input_, group, output_split_sizes, *args, **kwargs)  # type: ignore[no-any-return]
        sizes = [int(size) for size in output_split_sizes]
        padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
        padded[: input_.size(0)] = input_
        pieces = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(pieces, padded, group=group)
        return torch.cat([piece[:size] for piece, size in zip(pieces, sizes, strict=True)])

    return gather


def _reduce_and_cut(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce_scatter(
        input_: torch.Tensor, group: Any, input_split_sizes: Any = None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return original(input_, group, input_split_sizes, *args, **kwargs)  # type: ignore[no-any-return]
        total = input_.contiguous().clone()
        dist.all_reduce(total, group=group)
        sizes = [int(size) for size in input_split_sizes]
        pieces: list[torch.Tensor] = list(torch.split(total, sizes))
        mine: torch.Tensor = pieces[group.rank()]
        return mine.clone()

    return reduce_scatter
