"""The process groups of a run, from its flags."""

from __future__ import annotations

from mindspeed_rl.config import PretrainRunConfig, RLRunConfig
from mindspeed_rl.config.validate import RLPlan, RunPlan
from mindspeed_rl.memory.communicators import Groups, GroupUse, device_groups


def groups_of_run(
    rank: int, config: RLRunConfig | PretrainRunConfig, plan: RunPlan, *, engine_mc2: bool = False
) -> Groups:
    """The groups of more than one rank that a rank of the run uses, by name. Pure.

    They are those of any platform; ``engine_mc2``: see :class:`GroupUse`.
    """
    spec = plan.spec
    use = GroupUse(
        experts=spec.moe is not None,
        router_bias=spec.moe is not None and spec.moe.router_bias,
        tied=spec.tie_embeddings,
        sharded_optimizer=config.parallel.use_distributed_optimizer,
        engine_mc2=engine_mc2,
    )
    engine = plan.engine if isinstance(plan, RLPlan) else None
    return device_groups(rank, plan.parallel, engine, use)
