"""Builds what takes turns on the devices: engine, weight path, memory, state machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_rl.config import RLRunConfig, RolloutConfig, TrainConfig
from mindspeed_rl.config.validate import RLPlan
from mindspeed_rl.dryrun.budget import (
    assumptions_of,
    device_bytes,
    machine_on,
    resolve_offload,
    swaps_optimizer,
    usable_bytes,
)
from mindspeed_rl.experience.tensor_cache import TensorCache
from mindspeed_rl.launch.job import Job
from mindspeed_rl.memory.owners import MemoryPhase, OffloadMode, Owner
from mindspeed_rl.memory.prediction import MemoryPrediction, predict
from mindspeed_rl.observability.memory_ledger import Growing, MemoryLedger
from mindspeed_rl.orchestration.engine_stats import graph_sizes
from mindspeed_rl.phases.machine import CHAIN, Phases, Sharing
from mindspeed_rl.phases.transition import nothing
from mindspeed_rl.phases.weight_sync import DirectPath, StreamPath, WeightPath, WeightSync
from mindspeed_rl.resharding.checksums import WeightProof
from mindspeed_rl.resharding.executor import Resharder
from mindspeed_rl.resharding.stream import TensorStream
from mindspeed_rl.resharding.transports import make_transport
from mindspeed_rl.rollout.engine import EngineState
from mindspeed_rl.rollout.patches.routed_experts import ExpertRecorder
from mindspeed_rl.rollout.vllm_engine import VllmEngine
from mindspeed_rl.rollout.vllm_versions import engine_capabilities, installed_version
from mindspeed_rl.trainer import parallel_state
from mindspeed_rl.trainer.resident_memory import trainer_memory
from mindspeed_rl.trainer.train_engine import TrainEngine

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_GIB = 2**30


def memory_limit(job: Job[RLRunConfig, RLPlan]) -> int:
    """Bytes of a device that may be in use, the least of all ranks; 0: no limit.

    Collective: the world.
    """
    platform = job.platform
    total = 0 if platform.shares_host_memory else platform.memory().total_bytes
    return _least(device_bytes(job.config, total))


def predict_run(job: Job[RLRunConfig, RLPlan]) -> tuple[MemoryPrediction, str]:
    """The memory of this run with its offload mode, and why it is that. Collective: the world."""
    machine = machine_on(job.config, job.platform.name)
    assumptions = assumptions_of(job.config, machine)
    prediction = predict(job.config, job.plan, assumptions)
    limit = memory_limit(job)
    if not limit and job.config.memory.rl_offload == OffloadMode.AUTO:
        why = "auto: the device is the host, so nothing is gained by moving"
        return prediction, why
    ranks = prediction.representatives()
    taken = -_least(-job.platform.taken_bytes)
    mode, why = resolve_offload(prediction, ranks, usable_bytes(limit, machine, taken))
    return replace(prediction, assumptions=replace(assumptions, offload=mode)), why


def share_memory(
    job: Job[RLRunConfig, RLPlan],
    policy: TrainEngine,
    reference: TrainEngine | None,
    critic: TrainEngine | None = None,
    reward_model: TrainEngine | None = None,
) -> Sharing:
    """What leaves the device for the engine, and what of the engine leaves for it.

    Collective: the world.
    """
    prediction, why = predict_run(job)
    mode = prediction.assumptions.offload
    sleep = job.config.memory.rollout_sleep
    free_weights = sleep == "all" or (sleep == "auto" and mode is OffloadMode.ALL)
    job.say(
        f"memory during rollouts: offload {mode.value} ({why}); engine weights are "
        f"{'freed' if free_weights else 'kept'} while the trainer trains"
    )
    platform = job.platform
    groups = trainer_memory(policy, reference, critic, reward_model)
    if swaps_optimizer(job.config, machine_on(job.config, platform.name)):
        for owner in (Owner.OPTIMIZER, Owner.CRITIC_OPTIMIZER):
            groups.pop(owner, None)  # MindSpeed moves it
    kept = platform.shares_host_memory and mode is OffloadMode.NONE
    return Sharing(
        groups=groups,
        mode=mode,
        free_engine_weights=free_weights,
        # on a host that keeps everything, freed pages are used again by the same process
        release_cached_memory=nothing if kept else platform.release_cached_memory,
        wait_for_copies=platform.wait_for_copies,
    )


def open_ledger(
    job: Job[RLRunConfig, RLPlan],
    sharing: Sharing,
    engine: VllmEngine,
    cache: TensorCache,
    trained: Mapping[Owner, TrainEngine | None],
) -> MemoryLedger:
    """The ledger of trainer, engine and samples. Collective: the world.

    ``trained``: whose optimizer state an owner is; it comes with the first update.
    """
    options, rank = job.config.memory, job.world.rank
    prediction, _ = predict_run(job)
    owners: dict[str, Callable[[], int]] = {
        owner.value: group.num_bytes for owner, group in sharing.groups.items()
    }
    owners[Owner.ENGINE_WEIGHTS.value] = lambda: (
        0 if engine.state is EngineState.ASLEEP else engine.weight_bytes
    )
    owners[Owner.KV_CACHE.value] = lambda: (
        engine.cache_bytes if engine.state is EngineState.AWAKE else 0
    )
    owners[Owner.SAMPLES.value] = lambda: cache.num_bytes
    at_first = prediction.rank_table(rank)[MemoryPhase.LOAD]
    growing = {
        owner.value: Growing(at_first.get(owner, 0), partial(_has_updated, engine))
        for owner, engine in trained.items()
        if engine is not None
    }
    return MemoryLedger(
        owners,
        job.platform.memory,
        memory_limit(job) or None,
        options.memory_leak_mb * 2**20,
        {phase.value: prediction.border(rank, phase.value) for phase in CHAIN},
        unforeseen=(Owner.SAMPLES.value,),
        growing=growing,
    )


def _has_updated(engine: TrainEngine) -> bool:
    return engine.schedule.num_updates > 0


def watched(sharing: Sharing, ledger: MemoryLedger) -> Sharing:
    """The same, with the ledger at every border."""
    return replace(sharing, require_free=ledger.require_free, at_border=ledger.at_border)


def agreed_cache_bytes(requested_gb: float) -> int:
    """The key/value cache of every rank: the smallest that any was asked for.

    Nodes may be given different values; engines of different capacity would schedule differently.
    Collective: the world.
    """
    return _least(int(requested_gb * _GIB))


def _least(number: int) -> int:
    value = torch.tensor(number)
    dist.all_reduce(value, dist.ReduceOp.MIN)
    return int(value)


def rollout_dtype(rollout: RolloutConfig, train: TrainConfig) -> torch.dtype:
    """Element type of the engine."""
    name = rollout.rollout_dtype
    if name == "auto":
        return torch.bfloat16 if train.bf16 else torch.float32
    return DTYPES[name]


def build_rollout_engine(job: Job[RLRunConfig, RLPlan]) -> VllmEngine:
    """The engine of this rank. Collective: the world."""
    config = job.config
    build = "building the rollout engine"
    with job.watchdog.phase("build engine"), parallel_state.unchanged(build):
        return VllmEngine(
            model_dir=config.model.hf_checkpoint,
            layout=job.plan.vllm,
            rank=job.world.rank,
            platform=job.platform,
            dtype=str(rollout_dtype(config.rollout, config.train)).removeprefix("torch."),
            max_model_len=job.plan.max_model_len,
            kv_cache_bytes=agreed_cache_bytes(config.rollout.rollout_kv_cache_gb),
            seed=config.train.seed,
            options=config.vllm_options,
            tuning=config.engine,
            graph_sizes=graph_sizes(job),
            experts=_recorder_of(job),
        )


def check_expert_replay(config: RLRunConfig, platform: str) -> None:
    """Refuse to replay experts that the installed engine does not tell. Local.

    Raises:
        ValueError: naming the flag and what to use.
    """
    if config.rl.rl_routing_replay != "rollout":
        return
    row = engine_capabilities(installed_version(), platform)
    if not row.routed_experts:
        raise ValueError(
            f"--rl-routing-replay rollout: the experts that vLLM {row.version}x on {platform} "
            "chooses cannot be had from it; use trainer, or none"
        )


def _recorder_of(job: Job[RLRunConfig, RLPlan]) -> ExpertRecorder | None:
    if job.config.rl.rl_routing_replay != "rollout":
        return None
    return ExpertRecorder(job.plan.spec.expert_layers)


def build_phases(
    job: Job[RLRunConfig, RLPlan],
    policy: TrainEngine,
    engine: VllmEngine,
    sharing: Sharing,
    phase: Callable[[str], AbstractContextManager[None]],
) -> Phases:
    """The state machine with its weight path. Collective: plans are compared."""
    config, plan, world = job.config, job.plan, job.world
    dtype = rollout_dtype(config.rollout, config.train)
    read: Callable[[], Mapping[str, torch.Tensor]] = policy.named_parameters
    proof = WeightProof(plan.megatron, plan.vllm, world.rank, dtype)
    path = build_weight_path(job, dtype)
    sync = WeightSync(
        path, proof, read, config.rollout.reshard_verify_interval, job.platform.synchronize
    )
    return Phases(engine, sync, phase, sharing)


def build_weight_path(job: Job[RLRunConfig, RLPlan], dtype: torch.dtype) -> WeightPath:
    """The way of ``--reshard-path``. Local."""
    options, plan, world = job.config.rollout, job.plan, job.world
    common: dict[str, Any] = {
        "rank": world.rank,
        "ranks_per_node": world.local_size,
        "transport": make_transport(options.reshard_transport, world.size, job.platform.device),
        "dtype": dtype,
        "bucket_bytes": int(options.reshard_bucket_mb * 2**20),
    }
    if options.reshard_path == "stream":
        return StreamPath(TensorStream(plan.megatron, range(world.size), **common))
    relay = options.reshard_relay == "auto" and world.size > world.local_size
    return DirectPath(Resharder(plan.megatron, plan.vllm, relay=relay, **common))
