"""Lists the process groups of a rank that communicate on the device, each with its own buffers.

NCCL and HCCL create a communicator for every group object that is used, also where two groups have
the same ranks. megatron-core and the engine create theirs separately, so each counts. Groups that
no step uses and groups of one rank have no communicator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mindspeed_rl.core.layout import EngineLayout, ParallelLayout

Groups = dict[str, tuple[int, ...]]
_Peers = Callable[[int], tuple[int, ...]]

WORLD = "world"
ENGINE_MC2 = "rollout mc2"


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
        seen, groups = bytearray(parallel.world), []
        for rank in range(parallel.world):
            if seen[rank]:
                continue
            group = peers(rank)
            for member in group:
                seen[member] = True
            if len(group) > 1:
                groups.append(group)
        if groups:
            result[name] = tuple(groups)
    return result


@dataclass(frozen=True, slots=True)
class _Grid:
    """A grid of ranks as numbers of mixed radix, with the size of each axis, innermost first."""

    sizes: Mapping[str, int]

    def along(self, *axes: str) -> _Peers:
        """Return rank -> ranks, ascending, with the same position on all other axes."""
        walked, offsets, stride = [], [0], 1
        for axis, size in self.sizes.items():
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
    grid = _Grid({"tp": parallel.tp, "cp": parallel.cp, "dp": parallel.dp, "pp": parallel.pp})
    everyone = tuple(range(parallel.world))
    pipeline = grid.along("pp")

    def ends(rank: int) -> tuple[int, ...]:
        stages = pipeline(rank)
        both = tuple(dict.fromkeys((stages[0], stages[-1])))
        return both if rank in both else ()

    groups: dict[str, _Peers] = {
        "tp": grid.along("tp"),
        "cp": grid.along("cp"),
        "dp_cp": grid.along("cp", "dp"),
        "pp": pipeline,
    }
    if use.sharded_optimizer:
        groups["intra_dist_opt_instance"] = lambda _: everyone
    else:
        groups["mp"] = grid.along("tp", "pp")
    if use.tied:
        groups["embd"] = ends
    return groups


def _trainer_experts(parallel: ParallelLayout, use: GroupUse) -> dict[str, _Peers]:
    grid = _Grid(
        {"tp": parallel.etp, "ep": parallel.ep, "dp": parallel.expert_dp, "pp": parallel.pp}
    )
    groups = {
        "ep": grid.along("ep"),
        "ep_tp": grid.along("tp"),
        "tp_ep_mp": grid.along("tp", "ep"),
    }
    if use.router_bias:
        groups["tp_dp_cp"] = grid.along("tp", "ep", "dp")  # all ranks of a stage
    if parallel.ep > 1:  # otherwise gradients of experts use the groups of all others
        groups["ep_dp"] = grid.along("dp")
        if not use.sharded_optimizer:
            groups["tp_ep_pp"] = grid.along("tp", "ep", "pp")
    return groups


def _engine(engine: EngineLayout, use: GroupUse) -> dict[str, _Peers]:
    grid = _Grid({"tp": engine.tp, "dp": engine.dp, "replica": engine.num_replicas})
    groups = {"rollout tp": grid.along("tp"), "rollout dp": grid.along("dp")}
    if engine.expert_parallel:
        groups["rollout ep"] = grid.along("tp", "dp")
        if use.engine_mc2:
            groups[ENGINE_MC2] = groups["rollout ep"]
    return groups
