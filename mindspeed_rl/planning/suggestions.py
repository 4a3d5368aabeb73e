"""Finds single changes of flags that lower the peak memory of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mindspeed_rl.config import RLRunConfig, TrainingRunConfig
from mindspeed_rl.config.engine_options import as_flag
from mindspeed_rl.config.npu import check_npu
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.memory import FIXED_MODES
from mindspeed_rl.engines.registry import engine_provider
from mindspeed_rl.planning.budget import resolve_offload
from mindspeed_rl.planning.prediction import MemoryPrediction, Peak
from mindspeed_rl.planning.run_plan import RLPlan, RunPlan, check_engine, plan_pretrain, plan_rl

# Without graphs no sizes are captured: flags about them would be refused.
_EAGER = {"rollout_graph_mode": "eager", "rollout_graph_sizes": ()}


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Flags to add or change, and the predicted peak with them."""

    flags: str
    peak: Peak


def plan_of(config: TrainingRunConfig, world: int) -> RunPlan:
    """Plan the run of a configuration without looking at the files that it names.

    Raises:
        UsageError: The configuration is not possible.
    """
    if isinstance(config, RLRunConfig):
        return plan_rl(config, world, files=False)
    return plan_pretrain(config, world, files=False)


def suggest(prediction: MemoryPrediction, ranks: Sequence[int], usable: int) -> list[Suggestion]:
    """Return the changes that lower the peak of some ranks, the lowest peak first. Pure."""
    config, found = prediction.config, []
    before = prediction.peak(ranks).num_bytes
    for flags, section, values in _changes(config, prediction.plan):
        part: Any = getattr(config, section)
        new: Any = part | values if isinstance(part, dict) else replace(part, **values)
        sections: dict[str, Any] = {section: new}
        changed = replace(config, **sections)
        try:
            plan = plan_of(changed, prediction.world)
            platform = prediction.machine.platform
            check_npu(changed.ascend, changed.parallel, platform)
            check_engine(changed, plan, platform)
        except UsageError:  # the model, the layout or the platform does not allow the change
            continue
        after = replace(prediction, config=changed, plan=plan)
        after = replace(after, offload=resolve_offload(after, ranks, usable)[0])
        if (peak := after.peak(ranks)).num_bytes < 0.995 * before:
            found.append(Suggestion(flags, peak))
    return sorted(found, key=lambda suggestion: suggestion.peak.num_bytes)


def _changes(config: TrainingRunConfig, plan: RunPlan) -> list[tuple[str, str, dict[str, Any]]]:
    """Return the changes to try: flags as typed, and the fields of a section that they set."""
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
        half = config.rollout.rollout_kv_cache_gb / 2
        batched = engine_provider().batched_tokens_option
        changes += [
            (f"--rl-offload {mode}", "memory", {"rl_offload": mode.value}) for mode in FIXED_MODES
        ]
        changes += [
            ("--rollout-sleep all", "memory", {"rollout_sleep": "all"}),
            ("--rollout-graph-mode eager", "engine", _EAGER),
            (f"--rollout-kv-cache-gb {half:g}", "rollout", {"rollout_kv_cache_gb": half}),
            (f"{as_flag(batched)} 1024", "engine_options", {batched: 1024}),
        ]
        if config.rl.reference_pass == "tail":
            changes.append(("--reference-pass single", "rl", {"reference_pass": "single"}))
        if isinstance(plan, RLPlan) and plan.spec.moe and not plan.engine.expert_parallel:
            changes.append(_shared_experts(plan))
    return changes


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
