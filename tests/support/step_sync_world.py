"""One engine with data-parallel ranks of uneven loads, stepped with and without our reduction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from support.rollout_worlds import loaded_engine
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_rl.core.types import Completion
from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.rollout.requests import GenerationRequest, SamplingSettings, request_seed
from mindspeed_rl.rollout.stats import StepStats

LOADS = (7, 0, 1, 3)
SETTINGS = SamplingSettings(1.0, max_response_tokens=10, stop_token_ids=(1,))


class CountReductions(TorchDispatchMode):
    """Counts all-reduces of integers; those of activations are not of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.allreduce_.default:
            self.count += not args[0][0].is_floating_point()
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class Run:
    """One call of generate on one rank.

    Attributes:
        completions: of the rank's requests.
        stats: what was stepped.
        reductions: of integers, counted from outside.
    """

    completions: list[Completion]
    stats: StepStats
    reductions: int


def step_sync_world(world: World, model: str, flags: Sequence[str]) -> dict[str, Run]:
    """Rank function: the engine's own reductions, then ours at several intervals.

    Every rank has as many requests as :data:`LOADS` says, so that one of them only keeps pace.
    """
    from mindspeed_rl.vllm_patches import step_sync

    job, engine = loaded_engine(world, model, ["--vllm-max-num-seqs", "16", *flags])
    requests = [
        GenerationRequest(i, tuple(range(3, 6 + i)), request_seed(5, 0, 10 * world.rank + i))
        for i in range(LOADS[world.rank])
    ]
    runs = {}
    for name, interval in (("engine", 0), ("packed", 1), ("packed every 3", 3)):
        if interval:
            engine._agreement = step_sync.apply(job.platform.name)
            engine._interval = interval
        engine.stats = StepStats()
        with CountReductions() as counter:
            completions = list(engine.generate(requests, SETTINGS, 0).values())
        runs[name] = Run(completions, engine.stats, counter.count)
    return runs
