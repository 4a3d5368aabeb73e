"""Checks that the ranks of an engine are about to generate the same completions."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mindspeed_rl.core.layout import EngineLayout


def check_agreement(digest: bytes, engine: EngineLayout, rank: int) -> None:
    """Compare the digests of ranks. Collective: the tensor-parallel ranks of an engine.

    Raises:
        RuntimeError: Digests differ; names the ranks of the engine that differ from its first.
    """
    if engine.tp == 1:
        return
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group().cpu_group
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in range(engine.tp)]
    dist.all_gather(everyone, mine, group=group)
    different = [i for i, other in enumerate(everyone) if not torch.equal(other, everyone[0])]
    if different:
        raise RuntimeError(
            f"generate: ranks {different} of engine {engine.replica_of(rank)} were given other "
            "prompts, sampling settings or weights than its first rank"
        )
