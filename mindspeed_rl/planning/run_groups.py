"""Derives the process groups of a run from its flags."""

from __future__ import annotations

from mindspeed_rl.config import PretrainRunConfig, RLRunConfig
from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.planning.communicators import Groups, GroupUse, all_device_groups, device_groups
from mindspeed_rl.planning.run_plan import RLPlan, RunPlan


def groups_of_run(
    rank: int, config: RLRunConfig | PretrainRunConfig, plan: RunPlan, *, engine_mc2: bool = False
) -> Groups:
    """Return the groups of more than one rank that a rank of the run uses, by name. Pure.

    They are equal on all platforms but for ``engine_mc2``, see :class:`GroupUse`.
    """
    use = _use(config, plan, engine_mc2)
    return device_groups(rank, plan.parallel, _engine(plan), use)


def all_groups_of_run(
    config: RLRunConfig | PretrainRunConfig, plan: RunPlan, *, engine_mc2: bool = False
) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the groups of all ranks of the run: by name every group once. Pure."""
    return all_device_groups(plan.parallel, _engine(plan), _use(config, plan, engine_mc2))


def _engine(plan: RunPlan) -> EngineLayout | None:
    return plan.engine if isinstance(plan, RLPlan) else None


def _use(config: RLRunConfig | PretrainRunConfig, plan: RunPlan, engine_mc2: bool) -> GroupUse:
    spec = plan.spec
    return GroupUse(
        experts=spec.moe is not None,
        router_bias=spec.moe is not None and spec.moe.router_bias,
        tied=spec.tie_embeddings,
        sharded_optimizer=config.parallel.use_distributed_optimizer,
        engine_mc2=engine_mc2,
    )
