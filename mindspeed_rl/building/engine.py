"""Builds the rollout engine, its weight sync, and the plan and ledger of shared device memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_rl.adapters.base_model import BaseModel
from mindspeed_rl.building.models import Models
from mindspeed_rl.colocation.memory_ledger import MemoryLedger
from mindspeed_rl.colocation.scheduler import CHAIN, ColocationPlan
from mindspeed_rl.colocation.transition import nothing
from mindspeed_rl.config import RLRunConfig, RolloutConfig, ScoreRunConfig, TrainConfig
from mindspeed_rl.core.graph_sizes import (
    AUTO,
    best_graph_sizes,
    even_graph_sizes,
    limited,
    read_history,
)
from mindspeed_rl.core.memory import MemoryOwner, OffloadMode
from mindspeed_rl.deltas.path import DeltaResharder, delta_path
from mindspeed_rl.engines.registry import engine_provider
from mindspeed_rl.launch.failures import BUILD_ENGINE
from mindspeed_rl.launch.job import Job
from mindspeed_rl.launch.start_up import start_stage
from mindspeed_rl.planning.budget import (
    device_bytes,
    machine_on,
    resolve_offload,
    usable_bytes,
    with_offload_order,
)
from mindspeed_rl.planning.cache_size import with_cache_size
from mindspeed_rl.planning.prediction import MemoryPrediction
from mindspeed_rl.planning.run_plan import RLPlan, ScorePlan, check_engine
from mindspeed_rl.rollout.draft_costs import DraftRule
from mindspeed_rl.rollout.draft_history import DraftHistory
from mindspeed_rl.rollout.engine import EngineState, InferenceEngine
from mindspeed_rl.rollout.provider import EngineSettings, EngineSizes
from mindspeed_rl.samples.device_cache import TensorCache
from mindspeed_rl.trainer import parallel_state
from mindspeed_rl.trainer.resident_memory import trainer_memory
from mindspeed_rl.trainer.train_engine import TrainEngine
from mindspeed_rl.weight_layouts.rollout import RolloutLayout
from mindspeed_rl.weights.executor import Resharder
from mindspeed_rl.weights.stream import TensorStream
from mindspeed_rl.weights.sync import (
    WeightPath,
    WeightSync,
    reshard_path,
    stream_path,
    versions_of_ranks,
)
from mindspeed_rl.weights.transports import make_transport
from mindspeed_rl.weights.verify import WeightVerifier

_GIB = 2**30
_SCORED_AT_ONCE = 16  # sequences of a cache whose size nobody gave: runs that only score


def memory_limit(job: Job[RLRunConfig, RLPlan]) -> int:
    """Return the bytes of a device that may be in use, the least of all ranks; 0: no limit.

    Collective: the world.
    """
    platform = job.platform
    total = 0 if platform.shares_host_memory else platform.memory().total_bytes
    return _least(device_bytes(job.config, total))


def predict_run(job: Job[RLRunConfig, RLPlan]) -> tuple[MemoryPrediction, str]:
    """Predict the run's memory with an offload mode; also return why. Collective: the world."""
    machine = machine_on(job.config, job.platform.name)
    prediction = MemoryPrediction(job.config, job.plan, machine)
    limit = memory_limit(job)
    if not limit and job.config.memory.rl_offload == OffloadMode.AUTO:
        why = "auto: the device is the host, so nothing is gained by moving"
        return prediction, why
    ranks = prediction.representatives()
    taken = -_least(-job.platform.taken_bytes)
    usable = usable_bytes(limit, machine, taken)
    mode, why = resolve_offload(prediction, ranks, usable)
    return with_offload_order(replace(prediction, offload=mode), ranks, usable), why


def with_chosen_cache(job: Job[RLRunConfig, RLPlan]) -> Job[RLRunConfig, RLPlan]:
    """Return the job with the size of the engine's cache. Collective: the world.

    On a host each rank has its share of the memory; elsewhere it has a device.
    """
    machine = machine_on(job.config, job.platform.name)
    limit, taken = memory_limit(job), -_least(-job.platform.taken_bytes)
    shared = not limit
    if shared:
        host = job.platform.memory().total_bytes
        limit, taken = _least(host // job.world.local_size), 0
    prediction = MemoryPrediction(job.config, job.plan, machine)
    usable = usable_bytes(limit, machine, taken)
    config, lines = with_cache_size(prediction, usable, shared=shared)
    job.log_rank0(*lines)
    return replace(job, config=config)


def share_memory(
    job: Job[RLRunConfig, RLPlan],
    models: Models,
) -> ColocationPlan:
    """Decide what trainer and engine move off the device for each other.

    Collective: the world.
    """
    prediction, why = predict_run(job)
    order, mode = prediction.order, prediction.offload
    free_weights = prediction.frees_engine_weights
    away = "freed" if job.config.rollout.reshard_deltas == "off" else "copied to the host"
    job.log_rank0(
        f"memory during rollouts: offload {mode.value} ({why}); engine weights are "
        f"{away if free_weights else 'kept'} while the trainer trains",
        *([order.line()] if order else []),
    )
    platform = job.platform
    groups = trainer_memory(
        models.policy,
        None if isinstance(models.reference, BaseModel) else models.reference,
        models.critic,
        models.reward_model,
        [*models.teachers.values()],
    )
    if prediction.swap_parts:
        for owner in (MemoryOwner.OPTIMIZER, MemoryOwner.CRITIC_OPTIMIZER):
            groups.pop(owner, None)  # MindSpeed moves the optimizer states itself
    kept = platform.shares_host_memory and mode is OffloadMode.NONE
    return ColocationPlan(
        groups=groups,
        mode=mode,
        free_engine_weights=free_weights,
        late=frozenset({MemoryOwner.OPTIMIZER} if order and order.beside_sync else ()),
        # On a host that keeps everything, the same process uses freed pages again.
        release_cached_memory=nothing if kept else platform.release_cached_memory,
        wait_for_copies=platform.wait_for_copies,
    )


def open_ledger(
    job: Job[RLRunConfig, RLPlan],
    sharing: ColocationPlan,
    engine: InferenceEngine,
    cache: TensorCache,
    sync: WeightSync,
) -> MemoryLedger:
    """Open the memory ledger of trainer, engine, samples and weight sync. Collective: the world."""
    options, rank = job.config.memory, job.world.rank
    prediction, _ = predict_run(job)
    owners: dict[str, Callable[[], int]] = {
        owner.value: group.num_bytes for owner, group in sharing.groups.items()
    }
    owners[MemoryOwner.ENGINE_WEIGHTS.value] = lambda: (
        0 if engine.state is EngineState.ASLEEP else engine.weight_bytes
    )
    owners[MemoryOwner.KV_CACHE.value] = lambda: (
        engine.cache_bytes if engine.state is EngineState.AWAKE else 0
    )
    owners[MemoryOwner.SAMPLES.value] = lambda: cache.num_bytes
    if job.config.rollout.keeps_sent(on_host=job.platform.shares_host_memory):
        owners[MemoryOwner.SENT_WEIGHTS.value] = lambda: sync.kept_bytes
    return MemoryLedger(
        owners,
        job.platform.memory,
        memory_limit(job) or None,
        options.memory_leak_mb * 2**20,
        {phase.value: prediction.border(rank, phase.value) for phase in CHAIN},
    )


def watched(
    job: Job[RLRunConfig, RLPlan],
    sharing: ColocationPlan,
    ledger: MemoryLedger,
    sync: WeightSync,
) -> ColocationPlan:
    """Return a copy of the plan that knows what is free, and what a weight update takes. Local.

    The ledger checks every border between phases.
    """
    prediction = MemoryPrediction(job.config, job.plan, machine_on(job.config, job.platform.name))
    staging, sent = prediction.update_bytes(job.world.rank)
    return replace(
        sharing,
        require_free=ledger.require_free,
        at_border=ledger.at_border,
        sync_bytes=lambda: staging + max(0, sent - sync.kept_bytes),
    )


def agreed_cache_bytes(requested_gb: float) -> int:
    """Return the size of every rank's key/value cache: the smallest that any rank was asked for.

    Nodes may be given different values; engines of different capacity would schedule differently.
    Collective: the world.
    """
    return _least(int(requested_gb * _GIB))


def _least(number: int) -> int:
    value = torch.tensor(number)
    dist.all_reduce(value, dist.ReduceOp.MIN)
    return int(value)


def rollout_dtype(rollout: RolloutConfig, train: TrainConfig) -> torch.dtype:
    """Return the element type of the engine's weights and cache."""
    return torch.bfloat16 if rollout.engine_is_bf16(train) else torch.float32


def draft_history(config: RLRunConfig) -> DraftHistory | None:
    """Return an empty history for the drafts of a run; ``None`` where it has none."""
    if config.drafts.rollout_drafts == "none":
        return None
    return DraftHistory(int(config.drafts.rollout_draft_memory_gb * 2**30))


def build_rollout_engine(
    job: Job[RLRunConfig, RLPlan], history: DraftHistory | None = None
) -> InferenceEngine:
    """Build the rollout engine of this rank. Collective: the world.

    Args:
        job: Job with the rollout layout of the installed engine.
        history: Earlier responses, from which the engine drafts; ``None``: it does not.
    """
    config, plan = job.config, job.plan
    rule = None if history is None else DraftRule(most=config.drafts.rollout_draft_tokens)
    build = "building the rollout engine"
    records = config.rl.rl_routing_replay == "rollout"
    with job.watchdog.phase(BUILD_ENGINE), parallel_state.unchanged(build):
        return build_inference_engine(
            job,
            plan.max_model_len,
            tuning=config.engine,
            graph_sizes=graph_sizes(job),
            recorded_layers=tuple(plan.spec.expert_layers) if records else (),
            counted_layers=tuple(plan.spec.expert_layers) if config.balance.moves_experts else (),
            force_balance=config.benchmark.active and plan.spec.moe is not None,
            draft_rule=rule,
            draft_history=history,
            keeps_weights=config.rollout.reshard_deltas != "off",
        )


def scored_cache_bytes(sizes: EngineSizes, token_bytes: int, longest: int) -> int:
    """Return the cache of a run that only scores, where no flag gives it. Pure.

    Args:
        sizes: Sizes of the engine.
        token_bytes: Bytes of one token in all layers on a rank.
        longest: Tokens of the longest sequence.
    """
    return _SCORED_AT_ONCE * sizes.sequence_tokens(longest) * token_bytes


@start_stage("inference engine")
def build_inference_engine(
    job: Job[RLRunConfig, RLPlan] | Job[ScoreRunConfig, ScorePlan],
    max_model_len: int,
    **special: Any,
) -> InferenceEngine:
    """Build the engine that the flags and the rollout layout describe. Collective: the world.

    Args:
        job: Job with the rollout layout of the installed engine.
        max_model_len: Most tokens of a prompt and its response.
        special: Further settings of this kind of run, see :class:`EngineSettings`.
    """
    config, layout = job.config, job.plan.rollout_layout
    item = 2 if config.rollout.engine_is_bf16(config.train) else 4
    sizes = engine_provider().sizes(config.engine_options, layout.spec, job.platform.name)
    few = scored_cache_bytes(
        sizes, layout.spec.cached_values(layout.engine.tp) * item, max_model_len
    )
    settings = EngineSettings(
        model_dir=config.model.hf_checkpoint,
        layout=layout,
        rank=job.world.rank,
        dtype=str(rollout_dtype(config.rollout, config.train)).removeprefix("torch."),
        max_model_len=max_model_len,
        kv_cache_bytes=agreed_cache_bytes(config.rollout.rollout_kv_cache_gb or few / _GIB),
        seed=config.train.seed,
        options=config.engine_options,
        trust_remote_code=config.model.trust_remote_code,
        **special,
    )
    return engine_provider().build(settings, job.platform)


def graph_sizes(job: Job[RLRunConfig, RLPlan]) -> tuple[int, ...]:
    """Return the sizes of ``--rollout-graph-sizes``; empty: the engine's own. Collective: world.

    For ``auto``, rank 0, whose disk has the history, chooses them and prints their waste.
    """
    tuning, output = job.config.engine, Path(job.config.logging.output_dir)
    if tuning.rollout_graph_sizes != AUTO:
        return tuple(sorted({int(size) for size in tuning.rollout_graph_sizes}))
    chosen: list[tuple[int, ...]] = [()]
    if job.world.rank == 0:
        options, spec = job.config.engine_options, job.plan.spec
        most = engine_provider().sizes(options, spec, job.platform.name).sequences
        if history := limited(read_history(output), most):
            found = best_graph_sizes(history, tuning.rollout_graph_count)
            chosen = [found.sizes]
            job.log_rank0(
                f"graph sizes {' '.join(map(str, found.sizes))}: over the {history.total()} decode "
                f"steps of {output}, {found.waste:.1%} of the rows would be padding"
            )
        else:
            chosen = [even_graph_sizes(most, tuning.rollout_graph_count)]
            job.log_rank0(
                f"graph sizes {' '.join(map(str, chosen[0]))}: no earlier decode steps in {output}"
            )
    dist.broadcast_object_list(chosen, 0)
    return chosen[0]


def with_installed_engine(job: Job[RLRunConfig, RLPlan]) -> Job[RLRunConfig, RLPlan]:
    """Return the job with the rollout layout in which the installed engine keeps weights. Local.

    Raises:
        UsageError: the flags ask for what the installed engine cannot do.
    """
    check_engine(job.config, job.plan, job.platform.name)
    return replace(job, plan=replace(job.plan, rollout_layout=installed_layout(job)))


def installed_layout(
    job: Job[RLRunConfig, RLPlan] | Job[ScoreRunConfig, ScorePlan],
) -> RolloutLayout:
    """Return the rollout layout in which the installed engine keeps its weights. Local.

    Raises:
        UsageError: the installed engine lacks one of the options.
    """
    return engine_provider().installed_layout(
        job.plan.rollout_layout, job.config.engine_options, job.platform.name
    )


def build_weight_sync(job: Job[RLRunConfig, RLPlan], policy: TrainEngine) -> WeightSync:
    """Build the sync of the policy's weights to the engine. Collective: plans are compared."""
    return WeightSync(
        *weight_target(job),
        policy.merged_parameters,
        job.config.rollout.reshard_verify_interval,
        gather_versions=versions_of_ranks,
        log=job.log_rank0,
        synchronize=job.platform.wait_for_computation,
    )


def weight_target(job: Job[RLRunConfig, RLPlan]) -> tuple[WeightPath, WeightVerifier]:
    """Build the path of the weights into the job's rollout layout, and its proof. Local."""
    plan, dtype = job.plan, rollout_dtype(job.config.rollout, job.config.train)
    proof = WeightVerifier(plan.megatron, plan.rollout_layout, job.world.rank, dtype)
    return build_weight_path(job, dtype), proof


def build_weight_path(job: Job[RLRunConfig, RLPlan], dtype: torch.dtype) -> WeightPath:
    """Build the path of the weights that ``--reshard-path`` names. Local."""
    options, plan, world = job.config.rollout, job.plan, job.world
    common: dict[str, Any] = {
        "rank": world.rank,
        "ranks_per_node": world.local_size,
        "transport": make_transport(options.reshard_transport, world.size, job.platform.device),
        "dtype": dtype,
        "bucket_bytes": int(options.reshard_bucket_mb * 2**20),
    }
    if options.reshard_path == "stream":
        return stream_path(TensorStream(plan.megatron, range(world.size), **common))
    target = plan.rollout_layout
    everywhere = target.has_experts_everywhere
    relay = options.relays(world.size, world.local_size, experts_everywhere=everywhere)
    resharder = Resharder(plan.megatron, target, relay=relay, **common)
    if options.reshard_deltas == "off":
        return reshard_path(resharder)
    keeps = job.platform.device if options.reshard_deltas == "device" else torch.device("cpu")
    return delta_path(DeltaResharder(resharder, world.rank, keeps, job.log_rank0))
