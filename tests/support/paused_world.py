"""Partial rollouts of a real engine: what a pass leaves open goes on in the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from support.rollout_worlds import loaded_engine

from mindspeed_rl.core.types import Completion
from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.rollout.requests import GenerationRequest, SamplingSettings, request_seed
from mindspeed_rl.rollout.stats import StepStats

COUNT, LIMIT, PART = 12, 48, 10
SETTINGS = SamplingSettings(1.0, max_response_tokens=LIMIT, stop_token_ids=(1, 2, 3))


@dataclass(frozen=True, slots=True)
class Parts:
    """Responses that were sampled in parts.

    Attributes:
        completions: the whole responses.
        read: tokens that the engine computed, those that it sampled left out.
        stats: of all passes.
        left: requests, and used blocks, that are left when the cache is freed.
    """

    completions: dict[int, Completion]
    read: int
    stats: StepStats
    left: tuple[int, int]


def in_parts(engine: Any, keeps: bool, blocks: int | None = None) -> Parts:
    """Every pass has seeds of its own, and numbers its samples anew.

    The cache has ``blocks`` blocks if they are given.
    """
    scheduler = engine._engine.engine_core.engine_core.scheduler
    computed, original = [0], scheduler.schedule

    def schedule(*args: Any, **options: Any) -> Any:
        scheduled = original(*args, **options)
        computed[0] += scheduled.total_num_scheduled_tokens
        return scheduled

    scheduler.schedule = schedule
    pool = scheduler.kv_cache_manager.block_pool
    spare = pool.get_new_blocks(pool.get_num_free_blocks() - blocks) if blocks else []
    stats = engine.stats = StepStats()
    found: dict[int, Completion] = {}
    open_ = list(range(COUNT))
    passes = 0
    while open_:
        requests = []
        for place, i in enumerate(open_):
            had = found.get(i, Completion((), (), "length", 0))
            most = min(LIMIT, len(had.token_ids) + PART)
            prompt = tuple(5 + (7 * i + k) % 300 for k in range(20 + 9 * (i % 4)))
            requests.append(
                GenerationRequest(
                    place, prompt, request_seed(3, passes, i), most, had.token_ids, had.logprobs,
                    later_tokens=LIMIT - most if keeps else None,
                )
            )  # fmt: skip
        done = engine.generate(requests, SETTINGS, 0)
        found |= {open_[place]: c for place, c in done.items()}
        open_ = [i for i in open_ if found[i].truncated and len(found[i].token_ids) < LIMIT]
        passes += 1
        # what is open has another place in the next pass
        open_ = [*open_[1:], *open_[:1]]
        if passes == 2 and keeps:
            assert engine._engine.get_num_unfinished_requests() == 0
    scheduler.schedule = original
    pool.free_blocks(spare)
    engine.free_cache()
    left = len(scheduler.requests), scheduler.kv_cache_manager.usage
    engine.wake_cache()
    assert len({c.finish_reason for c in found.values()}) == 2, "some stop, some do not"
    return Parts(found, computed[0] - stats.sampled_tokens, replace(stats), left)


def paused_world(world: World, model: str, flags: Sequence[str]) -> dict[str, Parts]:
    """Rank function: with and without pauses; with fewer places and with fewer blocks."""
    _, engine = loaded_engine(world, model, ["--vllm-max-num-seqs", "8", *flags])
    found = {"read again": in_parts(engine, False), "kept": in_parts(engine, True)}
    found["few blocks"] = in_parts(engine, True, blocks=7)  # of 128 tokens each
    return found
