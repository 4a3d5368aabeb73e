"""Lists the process groups of a rank that communicate on the device, each with its own buffers.

NCCL and HCCL create a communicator for every group object that is used, also where two groups have
the same ranks. megatron-core and the engine create theirs separately, so each counts. Groups that
no step uses and groups of one rank have no communicator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mindspeed_rl.config import PretrainRunConfig, RLRunConfig
from mindspeed_rl.core.groups import context_group_name
from mindspeed_rl.core.layout import EngineLayout, ParallelLayout
from mindspeed_rl.planning.run_plan import RLPlan, RunPlan

GroupsOfRank = dict[str, tuple[int, ...]]
_Peers = Callable[[int], tuple[int, ...]]

WORLD = "world"
ENGINE_MC2 = "rollout mc2"


@dataclass(frozen=True, slots=True)
class RunGroups:
    """The process groups of a run, and the facts that decide which ones it uses. Pure.

    Groups of the trainer have the names of :data:`~mindspeed_rl.core.groups.MEGATRON_GROUPS`. They
    are equal on all platforms but for ``engine_mc2``.

    Attributes:
        parallel: Training layout.
        engine: Layout of the engines; ``None`` in supervised runs.
        experts: Whether the model has experts.
        router_bias: Whether routers have biases, whose token counts are reduced over ranks.
        tied: Whether input and output embeddings are one parameter.
        sharded_optimizer: Whether ``--use-distributed-optimizer`` is on.
        engine_mc2: Whether the engine dispatches tokens through a group of its own (vLLM-Ascend).
    """

    parallel: ParallelLayout
    engine: EngineLayout | None
    experts: bool = False
    router_bias: bool = False
    tied: bool = False
    sharded_optimizer: bool = False
    engine_mc2: bool = False

    @classmethod
    def of(
        cls, config: RLRunConfig | PretrainRunConfig, plan: RunPlan, *, engine_mc2: bool = False
    ) -> RunGroups:
        """The groups of a planned run."""
        kinds = [layer.moe for layer in plan.spec.layers if layer.moe]
        return cls(
            plan.parallel,
            plan.engine if isinstance(plan, RLPlan) else None,
            experts=bool(kinds),
            router_bias=any(moe.router_bias for moe in kinds),
            tied=plan.spec.tie_embeddings,
            sharded_optimizer=config.parallel.use_distributed_optimizer,
            engine_mc2=engine_mc2,
        )

    def of_rank(self, rank: int) -> GroupsOfRank:
        """Return the groups of more than one rank that this rank uses in a step, by name."""
        groups = {name: peers(rank) for name, peers in self._peers().items()}
        return {name: ranks for name, ranks in groups.items() if len(ranks) > 1}

    def of_all_ranks(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Return by name every group of more than one rank once, lowest ranks first."""
        result = {}
        for name, peers in self._peers().items():
            groups: list[tuple[int, ...]] = []
            seen: set[int] = set()
            for rank in range(self.parallel.world):
                if rank not in seen:
                    groups.append(peers(rank))
                    seen.update(groups[-1])
            result[name] = tuple(group for group in groups if len(group) > 1)
        return {name: groups for name, groups in result.items() if groups}

    def _peers(self) -> dict[str, _Peers]:
        """Return by name rank -> ranks of its group, empty or the rank alone where it has none."""
        everyone = tuple(range(self.parallel.world))
        groups: dict[str, _Peers] = {WORLD: lambda _: everyone, **self._trainer()}
        if self.experts:
            groups |= self._trainer_experts()
        return groups if self.engine is None else groups | self._rollout(self.engine)

    def _trainer(self) -> dict[str, _Peers]:
        parallel = self.parallel
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
        for size in parallel.context_sizes[1:-1]:
            split = {"tp": parallel.tp, "cp": size, "blocks": parallel.cp // size}
            split |= {"dp": parallel.dp, "pp": parallel.pp}
            groups[context_group_name(size)] = _along(split, "cp")
        if self.sharded_optimizer:
            groups["intra_dist_opt_instance"] = lambda _: everyone
        else:
            groups["mp"] = _along(grid, "tp", "pp")
        if self.tied:
            groups["embd"] = ends
        return groups

    def _trainer_experts(self) -> dict[str, _Peers]:
        parallel = self.parallel
        grid = {"tp": parallel.etp, "ep": parallel.ep, "dp": parallel.expert_dp, "pp": parallel.pp}
        groups = {
            "ep": _along(grid, "ep"),
            "ep_tp": _along(grid, "tp"),
            "tp_ep_mp": _along(grid, "tp", "ep"),
        }
        if self.router_bias:
            groups["tp_dp_cp"] = _along(grid, "tp", "ep", "dp")  # all ranks of a stage
        if parallel.ep > 1:  # otherwise gradients of experts use the groups of all others
            groups["ep_dp"] = _along(grid, "dp")
            if not self.sharded_optimizer:
                groups["tp_ep_pp"] = _along(grid, "tp", "ep", "pp")
        return groups

    def _rollout(self, engine: EngineLayout) -> dict[str, _Peers]:
        grid = {"tp": engine.tp, "dp": engine.dp, "replica": engine.num_replicas}
        groups = {"rollout tp": _along(grid, "tp"), "rollout dp": _along(grid, "dp")}
        if engine.expert_parallel:
            groups["rollout ep"] = _along(grid, "tp", "dp")
            if self.engine_mc2:
                groups[ENGINE_MC2] = groups["rollout ep"]
        return groups


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
