"""Lists the process groups of a rank that communicate on the device, each with its own buffers.

NCCL and HCCL create a communicator for every group object that is used, also where two groups have
the same ranks. megatron-core and the engine create theirs separately, so each counts. Groups that
no step uses and groups of one rank have no communicator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mindspeed_rl.config import PretrainRunConfig, RLRunConfig
from mindspeed_rl.core.layout import EngineLayout, ParallelLayout
from mindspeed_rl.planning.run_plan import RLPlan, RunPlan

Groups = dict[str, tuple[int, ...]]
_Peers = Callable[[int], tuple[int, ...]]

WORLD = "world"
ENGINE_MC2 = "rollout mc2"


def groups_of_run(
    rank: int, config: RLRunConfig | PretrainRunConfig, plan: RunPlan, *, engine_mc2: bool = False
) -> Groups:
    """Return the groups of more than one rank that a rank of the run uses, by name. Pure.

    They are equal on all platforms but for ``engine_mc2``, see :class:`GroupUse`.
    """
    return device_groups(rank, plan.parallel, _engine_of(plan), _use(config, plan, engine_mc2))


def all_groups_of_run(
    config: RLRunConfig | PretrainRunConfig, plan: RunPlan
) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the groups of all ranks of the run: by name every group once. Pure."""
    return all_device_groups(plan.parallel, _engine_of(plan), _use(config, plan))


def _engine_of(plan: RunPlan) -> EngineLayout | None:
    return plan.engine if isinstance(plan, RLPlan) else None


@dataclass(frozen=True, slots=True)
class GroupUse:
    """Facts other than layouts that decide which groups a run uses.

    Attributes:
        experts: Whether the model has experts.
        router_bias: Whether routers have biases, whose token counts are reduced over ranks.
        tied: Whether input and output embeddings are one parameter.
        sharded_optimizer: Whether ``--use-distributed-optimizer`` is on.
        engine_mc2: Whether the engine dispatches tokens through a group of its own (vLLM-Ascend).
    """

    experts: bool = False
    router_bias: bool = False
    tied: bool = False
    sharded_optimizer: bool = False
    engine_mc2: bool = False


def _use(
    config: RLRunConfig | PretrainRunConfig, plan: RunPlan, engine_mc2: bool = False
) -> GroupUse:
    kinds = [layer.moe for layer in plan.spec.layers if layer.moe]
    return GroupUse(
        experts=bool(kinds),
        router_bias=any(moe.router_bias for moe in kinds),
        tied=plan.spec.tie_embeddings,
        sharded_optimizer=config.parallel.use_distributed_optimizer,
        engine_mc2=engine_mc2,
    )


def device_groups(
    rank: int, parallel: ParallelLayout, engine: EngineLayout | None, use: GroupUse
) -> Groups:
    """Return the groups of more than one rank that this rank uses in a step, by name. Pure.

    Groups of the trainer have the names of :data:`~mindspeed_rl.core.groups.MEGATRON_GROUPS`.
    """
    groups = {name: peers(rank) for name, peers in _all_peers(parallel, engine, use).items()}
    return {name: ranks for name, ranks in groups.items() if len(ranks) > 1}


def all_device_groups(
    parallel: ParallelLayout, engine: EngineLayout | None, use: GroupUse
) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the groups of all ranks: by name every group once, lowest ranks first. Pure."""
    result = {}
    for name, peers in _all_peers(parallel, engine, use).items():
        groups: list[tuple[int, ...]] = []
        seen: set[int] = set()
        for rank in range(parallel.world):
            if rank not in seen:
                groups.append(peers(rank))
                seen.update(groups[-1])
        result[name] = tuple(group for group in groups if len(group) > 1)
    return {name: groups for name, groups in result.items() if groups}


def _along(sizes: Mapping[str, int], *axes: str) -> _Peers:
    """Return rank -> ranks, ascending, with the same position on all axes but ``axes``.

    Args:
        sizes: Size of each axis of a grid of ranks, innermost first.
        axes: Axes along which the ranks differ.
    """
    walked, offsets, stride = [], [0], 1
    for axis, size in sizes.items():
        if axis in axes:
            walked.append((stride, size))
            offsets = [i * stride + inner for i in range(size) for inner in offsets]
        stride *= size

    def peers(rank: int) -> tuple[int, ...]:
        first = rank - sum(rank // stride % size * stride for stride, size in walked)
        return tuple(first + offset for offset in offsets)

    return peers


def _all_peers(
    parallel: ParallelLayout, engine: EngineLayout | None, use: GroupUse
) -> dict[str, _Peers]:
    """Return by name rank -> ranks of its group, empty or the rank alone where it has none."""
    everyone = tuple(range(parallel.world))
    groups: dict[str, _Peers] = {WORLD: lambda _: everyone}
    groups |= _trainer(parallel, use)
    if use.experts:
        groups |= _trainer_experts(parallel, use)
    if engine is not None:
        groups |= _engine(engine, use)
    return groups


def _trainer(parallel: ParallelLayout, use: GroupUse) -> dict[str, _Peers]:
    grid = {"tp": parallel.tp, "cp": parallel.cp, "dp": parallel.dp, "pp": parallel.pp}
    everyone = tuple(range(parallel.world))
    pipeline = _along(grid, "pp")

    def ends(rank: int) -> tuple[int, ...]:
        stages = pipeline(rank)
        both = tuple(dict.fromkeys((stages[0], stages[-1])))
        return both if rank in both else ()

    groups: dict[str, _Peers] = {
        "tp": _along(grid, "tp"),
        "cp": _along(grid, "cp"),
        "dp_cp": _along(grid, "cp", "dp"),
        "pp": pipeline,
    }
    if use.sharded_optimizer:
        groups["intra_dist_opt_instance"] = lambda _: everyone
    else:
        groups["mp"] = _along(grid, "tp", "pp")
    if use.tied:
        groups["embd"] = ends
    return groups


def _trainer_experts(parallel: ParallelLayout, use: GroupUse) -> dict[str, _Peers]:
    grid = {"tp": parallel.etp, "ep": parallel.ep, "dp": parallel.expert_dp, "pp": parallel.pp}
    groups = {
        "ep": _along(grid, "ep"),
        "ep_tp": _along(grid, "tp"),
        "tp_ep_mp": _along(grid, "tp", "ep"),
    }
    if use.router_bias:
        groups["tp_dp_cp"] = _along(grid, "tp", "ep", "dp")  # all ranks of a stage
    if parallel.ep > 1:  # otherwise gradients of experts use the groups of all others
        groups["ep_dp"] = _along(grid, "dp")
        if not use.sharded_optimizer:
            groups["tp_ep_pp"] = _along(grid, "tp", "ep", "pp")
    return groups


def _engine(engine: EngineLayout, use: GroupUse) -> dict[str, _Peers]:
    grid = {"tp": engine.tp, "dp": engine.dp, "replica": engine.num_replicas}
    groups = {"rollout tp": _along(grid, "tp"), "rollout dp": _along(grid, "dp")}
    if engine.expert_parallel:
        groups["rollout ep"] = _along(grid, "tp", "dp")
        if use.engine_mc2:
            groups[ENGINE_MC2] = groups["rollout ep"]
    return groups
