"""Finds changes of flags that lower the peak memory of a run: single ones, or some together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice
from typing import Any

from mindspeed_rl.config import RLRunConfig, TrainingRunConfig
from mindspeed_rl.config.engine_options import as_flag
from mindspeed_rl.config.npu import check_npu
from mindspeed_rl.config.rl import PASS_FLAGS
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.memory import FIXED_MODES, MemoryPhase
from mindspeed_rl.engines.registry import engine_provider
from mindspeed_rl.planning.budget import resolve_offload
from mindspeed_rl.planning.prediction import MemoryPrediction, Peak
from mindspeed_rl.planning.run_plan import RLPlan, RunPlan, check_engine, plan_pretrain, plan_rl

# Without graphs no sizes are captured: flags about them would be refused.
_EAGER = {"rollout_graph_mode": "eager", "rollout_graph_sizes": ()}


_MOST_TOGETHER = 3
_MOST_TRIED = 12  # sets of a size that are predicted before it is said that none is enough
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Flags to add or change.

    Attributes:
        flags: Flags as typed.
        peak: Predicted peak with them.
        mended: Phases that fit with them and did not without.
        number: How many changes they are.
    """

    flags: str
    peak: Peak
    mended: tuple[MemoryPhase, ...] = ()
    number: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    """Flags as typed, and the fields of a section of the configuration that they set."""

    flags: str
    section: str
    values: dict[str, Any]

    def applied(self, config: TrainingRunConfig) -> TrainingRunConfig:
        part: Any = getattr(config, self.section)
        new: Any = part | self.values if isinstance(part, dict) else replace(part, **self.values)
        sections: dict[str, Any] = {self.section: new}
        return replace(config, **sections)

    def sets_what(self, other: _Change) -> bool:
        """Whether both set the same field, so that one of them is enough."""
        return self.section == other.section and not self.values.keys().isdisjoint(other.values)


def plan_of(config: TrainingRunConfig, world: int) -> RunPlan:
    """Plan the run of a configuration without looking at the files that it names.

    Raises:
        UsageError: The configuration is not possible.
    """
    if isinstance(config, RLRunConfig):
        return plan_rl(config, world, files=False)
    return plan_pretrain(config, world, files=False)


def suggest(prediction: MemoryPrediction, ranks: Sequence[int], usable: int) -> list[Suggestion]:
    """Return what would help a run that does not fit, the lowest peak first. Pure.

    These are the changes that lower the peak of some ranks, or let a phase fit. Where none of them
    is enough, the fewest that are enough together come last.
    """
    before, found = prediction.peaks(ranks), list[Suggestion]()
    highest, changed = max(before.values()), dict[_Change, Mapping[MemoryPhase, int]]()
    excess = before.get(MemoryPhase.ROLLOUT, 0) - usable
    for change in _changes(prediction.config, prediction.plan, excess / _GIB):
        if (after := _with(prediction, [change], ranks, usable)) is None:
            continue
        changed[change] = phases = after.peaks(ranks)
        mended = tuple(p for p, b in phases.items() if b <= usable < before.get(p, 0))
        if mended or max(phases.values()) < 0.995 * highest:
            found.append(Suggestion(change.flags, after.peak(ranks), mended))
    found.sort(key=lambda suggestion: suggestion.peak.num_bytes)
    if found and found[0].peak.num_bytes <= usable:
        return found
    for number in range(2, _MOST_TOGETHER + 1):
        for together in islice(_sets(changed, usable, number), _MOST_TRIED):
            after = _with(prediction, together, ranks, usable)
            if after is not None and (peak := after.peak(ranks)).num_bytes <= usable:
                flags = " ".join(change.flags for change in together)
                return [*found, Suggestion(flags, peak, number=number)]
    return found


def _with(
    prediction: MemoryPrediction, changes: Sequence[_Change], ranks: Sequence[int], usable: int
) -> MemoryPrediction | None:
    """Predict with changes; ``None`` where model, layout or platform do not allow them."""
    config = prediction.config
    try:
        for change in changes:
            config = change.applied(config)
        plan = plan_of(config, prediction.world)
        platform = prediction.machine.platform
        check_npu(config.ascend, config.parallel, platform)
        check_engine(config, plan, platform)
    except UsageError:
        return None
    after = replace(prediction, config=config, plan=plan)
    return replace(after, offload=resolve_offload(after, ranks, usable)[0])


def _sets(
    changed: Mapping[_Change, Mapping[MemoryPhase, int]], usable: int, number: int
) -> Iterator[tuple[_Change, ...]]:
    """Yield sets of changes, the likeliest first: in every phase the best of a set counts."""
    rated = []
    for together in combinations(changed, number):
        if any(one.sets_what(other) for one, other in combinations(together, 2)):
            continue
        peaks = [changed[change] for change in together]
        lower = max(min(peak.get(phase, 0) for peak in peaks) for phase in peaks[0])
        rated.append((max(lower, usable), together))  # of those that are enough the first
    yield from (together for _, together in sorted(rated, key=lambda found: found[0]))


def _changes(config: TrainingRunConfig, plan: RunPlan, excess_gib: float) -> Iterator[_Change]:
    """Yield the changes to try.

    Args:
        config: Configuration of the run.
        plan: Plan of the run.
        excess_gib: GiB of the fullest rollout that do not fit; not above 0 where it fits.
    """
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    full = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    train = config.train
    if tokens := train.max_tokens_per_micro_batch:
        name, fewer = "max_tokens_per_micro_batch", tokens // 2
    else:
        name, fewer = "micro_batch_size", max(1, train.micro_batch_size // 2)
    chunk = max(1, (config.train.logprob_chunk_tokens or 1024) // 4)
    changes: list[tuple[str, str, dict[str, Any]]] = [
        ("--use-distributed-optimizer", "parallel", {"use_distributed_optimizer": True}),
        ("--sequence-parallel", "parallel", {"sequence_parallel": True}),
        ("--swap-optimizer", "ascend", {"swap_optimizer": True}),
        (recompute, "train", full),
        (f"--{name.replace('_', '-')} {fewer}", "train", {name: fewer}),
        (f"--logprob-chunk-tokens {chunk}", "train", {"logprob_chunk_tokens": chunk}),
    ]
    if config.checkpoint.save:
        changes.append(("--no-save-optim", "checkpoint", {"no_save_optim": True}))
    if isinstance(config, RLRunConfig):
        cache = _smaller_cache(config.rollout.rollout_kv_cache_gb, excess_gib)
        batched = engine_provider().batched_tokens_option
        changes += [
            (f"--rl-offload {mode}", "memory", {"rl_offload": mode.value}) for mode in FIXED_MODES
        ]
        changes += [
            ("--rollout-sleep all", "memory", {"rollout_sleep": "all"}),
            ("--rollout-graph-mode eager", "engine", _EAGER),
            (f"--rollout-kv-cache-gb {cache:g}", "rollout", {"rollout_kv_cache_gb": cache}),
            (f"{as_flag(batched)} 1024", "engine_options", {batched: 1024}),
        ]
        for flag in (PASS_FLAGS[name] for name in config.rl.tail_passes):
            field = flag.removeprefix("--").replace("-", "_")
            changes.append((f"{flag} single", "rl", {field: "single"}))
        if isinstance(plan, RLPlan) and plan.spec.moe and not plan.engine.expert_parallel:
            changes.append(_shared_experts(plan))
    yield from (_Change(*change) for change in changes)


def _smaller_cache(cache_gb: float, excess_gib: float) -> float:
    """Return the largest cache, in quarters of a GiB, with which rollouts fit; else half of it."""
    fitting = math.floor(4 * (cache_gb - excess_gib)) / 4
    return fitting if 0 < fitting < cache_gb else cache_gb / 2


def _shared_experts(plan: RLPlan) -> tuple[str, str, dict[str, Any]]:
    """Return the change to the largest engines whose ranks share the experts evenly."""
    world, tp, experts = plan.parallel.world, plan.engine.tp, plan.spec.num_experts
    sizes = (tp * dp for dp in range(1, world // tp + 1) if not world % (tp * dp))
    size = max((n for n in sizes if not experts % n), default=tp)
    flags = f"--rollout-dp {size // tp} --rollout-ep {size}"
    return (
        flags,
        "rollout",
        {"rollout_dp": size // tp, "rl_inference_expert_model_parallel_size": size},
    )
