"""Computes the critic's values and runs its optimizer steps (PPO).

Shapes: N trained tokens of a micro-batch. The micro-batches are the policy's own: one plan serves
every pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from mindspeed_rl.algorithms.types import Denominators, LossOutputs, Sequences, ValueInputs
from mindspeed_rl.algorithms.value_loss import explained_variance, value_loss
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.metrics.metric_set import Max, Mean, MetricSet
from mindspeed_rl.rl.batches import OptimizerBatch
from mindspeed_rl.samples.packing import MicroBatch
from mindspeed_rl.trainer.nonfinite import require_finite
from mindspeed_rl.trainer.train_engine import TrainEngine, ValueLossFunction, collect_metrics


def values_of_rows(
    micro: MicroBatch, reduce: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return the critic's values at all trained tokens of whole rows. Collective as ``reduce`` is.

    Args:
        micro: Micro-batch with the column ``old_values``, [N] of this rank's tokens.
        reduce: Sums a tensor over the ranks that share the rows.
    """
    own = micro.column("old_values")
    return reduce(
        own.new_zeros(sum(micro.num_trained)).index_copy_(0, micro.trained_index.long(), own)
    )


def value_metrics(critic: TrainEngine, micro: Sequence[MicroBatch]) -> MetricSet:
    """Return how well values predicted the returns of the step. Collective: the last stage."""
    if not critic.is_last_stage or not micro:
        return MetricSet({"value/explained_variance": Max()})
    returns = [m.columns["returns"] for m in micro if "returns" in m.columns]
    values = [m.columns["old_values"] for m in micro if "old_values" in m.columns]
    known = explained_variance(returns, values, critic.all_reduce_dp_cp)
    return MetricSet({"value/explained_variance": Max(known)})


def critic_loss(config: RLRunConfig) -> partial[LossOutputs]:
    """Return the critic's loss but for its inputs and the denominators of an optimizer step.

    It weighs tokens as the policy's loss does.
    """
    return partial(
        value_loss,
        clip=config.critic.value_clip,
        aggregation=config.policy_loss.aggregation,
        longest=config.rollout.rollout_max_response_length,
    )


def empty_value_metrics(loss: ValueLossFunction) -> MetricSet:
    """Return zero metrics with the names that a loss reports, for ranks without it. Local."""
    none = torch.zeros(0)
    owners = Sequences(torch.zeros(0, dtype=torch.int64), none)
    return collect_metrics([loss(ValueInputs(none, none, none, owners))])


def update_critic(
    critic: TrainEngine,
    loss: Callable[..., LossOutputs],
    updates: Sequence[OptimizerBatch],
    iterations: int,
) -> MetricSet:
    """Run all optimizer steps of the critic of an RL step. Collective: the training grid.

    Args:
        critic: Critic with its optimizer on the device.
        loss: See :func:`critic_loss`.
        updates: Micro-batches of each optimizer step with returns, and the global denominators.
        iterations: Number of times that all optimizer steps run.
    """
    metrics = empty_value_metrics(partial(loss, denominators=Denominators(0, 0)))
    metrics = metrics.merge(value_metrics(critic, [m for u in updates for m in u.micro_batches]))
    metrics = metrics.merge({"value/grad_norm": Mean(0.0, 0.0), "value/lr": Max()})
    for _ in range(iterations):
        for update in updates:
            if update.denominators.tokens == 0:  # skipped as for the policy
                continue
            of_update = partial(loss, denominators=update.denominators)
            found = critic.forward_backward(update.micro_batches, of_update)
            require_finite(critic, update.micro_batches, of_update)
            stats = critic.step()
            metrics = metrics.merge(found).merge(
                {
                    "value/grad_norm": Mean(stats.grad_norm, 1.0),
                    "value/lr": Max(stats.learning_rate),
                }
            )
    return metrics
