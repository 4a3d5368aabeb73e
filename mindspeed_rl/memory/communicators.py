"""Process groups of a rank that move tensors on the device: each has buffers of its own (R24).

NCCL and HCCL make a communicator for every group object that is used, also where two groups have
the same ranks. megatron-core and the engine build theirs apart, so each counts; groups that no step
uses have none, and groups of one rank neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mindspeed_rl.parallel.layout import EngineLayout, ParallelLayout

Groups = dict[str, tuple[int, ...]]

WORLD = "world"
MEGATRON_GROUPS: Mapping[str, str] = MappingProxyType(
    {
        "tp": "tensor_model_parallel_group",
        "cp": "context_parallel_group",
        "dp": "data_parallel_group",
        "dp_cp": "data_parallel_group_with_cp",
        "pp": "pipeline_model_parallel_group",
        "mp": "model_parallel_group",
        "embd": "embedding_group",
        "pos_embd": "position_embedding_group",
        "tp_dp_cp": "tensor_and_data_parallel_group_with_cp",
        "tp_dp": "tensor_and_data_parallel_group",
        "tp_cp": "tensor_and_context_parallel_group",
        "ep": "expert_model_parallel_group",
        "ep_tp": "expert_tensor_parallel_group",
        "tp_ep_mp": "expert_tensor_and_model_parallel_group",
        "tp_ep_pp": "expert_tensor_model_pipeline_parallel_group",
        "ep_dp": "expert_data_parallel_group",
        "intra_dist_opt_instance": "intra_distributed_optimizer_instance_group",
    }
)
"""Groups that megatron-core makes here: what it calls their options -> their description."""
ENGINE_MC2 = "rollout mc2"


@dataclass(frozen=True, slots=True)
class GroupUse:
    """What decides which groups a run uses, beside its layouts.

    Attributes:
        experts: the model has some.
        router_bias: their routers have biases, which are counted over ranks.
        tied: input and output embeddings are one parameter.
        sharded_optimizer: ``--use-distributed-optimizer``.
        engine_mc2: the engine sends tokens to experts through a group of its own (vLLM-Ascend).
    """

    experts: bool = False
    router_bias: bool = False
    tied: bool = False
    sharded_optimizer: bool = False
    engine_mc2: bool = False


def device_groups(
    rank: int, parallel: ParallelLayout, engine: EngineLayout | None, use: GroupUse
) -> Groups:
    """The groups of more than one rank that this rank uses in a step, by name. Pure.

    Those of the trainer have megatron-core's names (:data:`MEGATRON_GROUPS`).
    """
    groups = {WORLD: tuple(range(parallel.world))}
    groups |= _trainer(rank, parallel, use)
    if use.experts:
        groups |= _trainer_experts(rank, parallel, use)
    if engine is not None:
        groups |= _engine(rank, engine, use)
    return {name: ranks for name, ranks in groups.items() if len(ranks) > 1}


def _trainer(rank: int, parallel: ParallelLayout, use: GroupUse) -> Groups:
    at = parallel.coords(rank)

    def alike(*axes: str) -> tuple[int, ...]:
        return tuple(
            r
            for r in range(parallel.world)
            if all(getattr(parallel.coords(r), axis) == getattr(at, axis) for axis in axes)
        )

    pipeline = alike("tp", "cp", "dp")
    groups = {
        "tp": alike("pp", "cp", "dp"),
        "cp": alike("pp", "tp", "dp"),
        "dp_cp": alike("pp", "tp"),
        "pp": pipeline,
    }
    if use.sharded_optimizer:
        groups["intra_dist_opt_instance"] = tuple(range(parallel.world))
    else:
        groups["mp"] = alike("cp", "dp")
    ends = (pipeline[0], pipeline[-1])
    if use.tied and rank in ends:
        groups["embd"] = tuple(dict.fromkeys(ends))
    return groups


def _trainer_experts(rank: int, parallel: ParallelLayout, use: GroupUse) -> Groups:
    at, per_stage = parallel.expert_coords(rank), parallel.ranks_per_stage

    def alike(*axes: str, stages: bool = False) -> tuple[int, ...]:
        return tuple(
            r
            for r in range(parallel.world)
            if (stages or r // per_stage == rank // per_stage)
            and all(getattr(parallel.expert_coords(r), axis) == getattr(at, axis) for axis in axes)
        )

    groups = {
        "ep": alike("tp", "dp"),
        "ep_tp": alike("ep", "dp"),
        "tp_ep_mp": alike("dp"),
    }
    if use.router_bias:
        groups["tp_dp_cp"] = tuple(
            r for r in range(parallel.world) if r // per_stage == rank // per_stage
        )
    if parallel.ep > 1:  # else gradients of experts go the way of all others
        groups["ep_dp"] = alike("tp", "ep")
        if not use.sharded_optimizer:
            groups["tp_ep_pp"] = alike("dp", stages=True)
    return groups


def _engine(rank: int, engine: EngineLayout, use: GroupUse) -> Groups:
    first = engine.replica_of(rank) * engine.size
    inside = range(first, first + engine.size)
    peers = tuple(r for r in inside if engine.stage_of(r) == engine.stage_of(rank))
    groups = {
        "rollout tp": tuple(r for r in peers if engine.group_of(r) == engine.group_of(rank)),
        "rollout dp": tuple(r for r in peers if engine.tp_rank(r) == engine.tp_rank(rank)),
    }
    if engine.expert_parallel:
        groups["rollout ep"] = peers
        if use.engine_mc2:
            groups[ENGINE_MC2] = peers
    return groups
