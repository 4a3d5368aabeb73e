"""Moves experts of the engine between steps, to where the load of the last rollouts wants them.

Every weight update writes all weights of the engine. An expert that goes to another rank there
costs nothing beyond the bytes of the new layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mindspeed_rl.building.engine import rollout_dtype, weight_target
from mindspeed_rl.expert_placement.balance import plan_balance
from mindspeed_rl.expert_placement.near_trainer import TrainerExperts, lacking_elements
from mindspeed_rl.metrics.metric_set import Mean, MetricSet
from mindspeed_rl.parallel.small_collectives import all_reduce_sum
from mindspeed_rl.rl.components import Components, RunState
from mindspeed_rl.weight_layouts.rollout import RolloutLayout, Slots


def balance_experts(run: Components, state: RunState) -> MetricSet:
    """Decide by the tokens of this step's rollouts where the next weight update puts experts.

    Collective: the world. Nothing happens where another placement would save too little.

    Returns:
        The imbalance of these rollouts, and that of the best placement known for them; empty
        without ``--rollout-expert-placement balanced``.
    """
    if not run.config.balance.moves_experts:
        return MetricSet()
    load = all_reduce_sum(run.rollouts.engine.take_expert_load()).numpy()
    source, start = run.plan.megatron, run.plan.rollout_layout
    present = _layout(run, state)
    found = plan_balance(
        _slots(present), _slots(start), load, TrainerExperts(source, present.engine)
    )
    if found.slots is not None:
        state.layer_experts = tuple(found.slots.items())
        retarget(run, state)
        _log_change(run, present, _layout(run, state), found.imbalance, found.reachable)
    elif state.step == 1:
        run.job.log_rank0(
            f"experts: places stay; the busiest ranks had {found.imbalance:.3g} times the mean of "
            f"tokens, and would have had {found.reachable:.3g}; experts/imbalance says so of each "
            "step"
        )
    return MetricSet(
        {
            "experts/imbalance": Mean(found.imbalance, 1.0),
            "experts/imbalance_reachable": Mean(found.reachable, 1.0),
            "experts/moved": Mean(float(found.slots is not None), 1.0),
        }
    )


def retarget(run: Components, state: RunState) -> None:
    """Let the next weight update write the engine's layout of the state. Local."""
    if not state.layer_experts:
        return
    job = replace(run.job, plan=replace(run.plan, rollout_layout=_layout(run, state)))
    run.weight_sync.retarget(*weight_target(job), state.layer_experts)


def _layout(run: Components, state: RunState) -> RolloutLayout:
    planned = run.plan.rollout_layout
    return replace(planned, layer_experts=state.layer_experts or planned.layer_experts)


def _slots(layout: RolloutLayout) -> Mapping[int, Slots]:
    return {layer: layout.experts_at(layer) for layer in layout.spec.expert_layers}


def _log_change(
    run: Components, before: RolloutLayout, after: RolloutLayout, busiest: float, reached: float
) -> None:
    item = rollout_dtype(run.config.rollout, run.config.train).itemsize
    gib = [item * lacking_elements(run.plan.megatron, layout) / 2**30 for layout in (before, after)]
    run.job.log_rank0(
        f"experts: other places from the next weight update on; the busiest ranks had "
        f"{busiest:.3g} times the mean of tokens, and would have had {reached:.3g}; an update "
        f"brings a rank {gib[1]:.3g} GiB of experts in the mean, {gib[0]:.3g} before"
    )
