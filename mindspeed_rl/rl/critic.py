"""The critic's part of an RL step: values, their targets, its updates (PPO).

Shapes: N trained tokens of a micro-batch. The micro-batches are the policy's own: one plan serves
every pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from mindspeed_rl.algorithms.settings import value_loss_settings
from mindspeed_rl.algorithms.token_advantages import ValueTargets, generalized_advantages
from mindspeed_rl.algorithms.types import Denominators, LossOutputs, Sequences, ValueInputs
from mindspeed_rl.algorithms.value_loss import ValueLossSettings, explained_variance, value_loss
from mindspeed_rl.memory.owners import CRITIC_OWNERS, Owner
from mindspeed_rl.observability.metrics import Max, Mean, MetricSet
from mindspeed_rl.rl import training
from mindspeed_rl.rl.build import RLJob
from mindspeed_rl.trainer.prepared import PreparedBatch
from mindspeed_rl.trainer.train_engine import ValueLossFunction


def with_values(
    run: RLJob, updates: Sequence[Sequence[PreparedBatch]]
) -> list[list[PreparedBatch]]:
    """The micro-batches of every optimizer step with the critic's values.

    One pass for each step, since micro-batches are of equal length within a step only.
    Collective: the training grid; within TRAIN.
    """
    assert run.critic is not None
    with run.phases.resident(Owner.CRITIC):
        found = [run.critic.values(micro) for micro in updates]
    return [
        [replace(m, old_values=v) for m, v in zip(micro, values, strict=True)]
        for micro, values in zip(updates, found, strict=True)
    ]


def value_targets(
    micro: PreparedBatch,
    rewards: torch.Tensor,
    reduce: Callable[[torch.Tensor], torch.Tensor],
    *,
    discount: float,
    trace_decay: float,
) -> ValueTargets:
    """Advantages and returns of this rank's tokens, [N] each. Collective as ``reduce`` is.

    Args:
        micro: with values.
        rewards: of every trained token of the whole row.
        reduce: sums a tensor over the ranks that share the row.
        discount: gamma.
        trace_decay: lambda.
    """
    batch = micro.batch
    assert micro.old_values is not None
    row = torch.zeros_like(rewards).index_copy_(0, batch.trained_index, micro.old_values)
    found = generalized_advantages(
        rewards, reduce(row), batch.num_trained, discount=discount, trace_decay=trace_decay
    )
    own = batch.trained_index
    return ValueTargets(found.advantages[own], found.returns[own])


def with_targets(
    run: RLJob,
    micro: Sequence[PreparedBatch],
    rewards: Sequence[torch.Tensor],
    known: Sequence[torch.Tensor],
) -> tuple[list[PreparedBatch], list[torch.Tensor]]:
    """The micro-batches with returns, and the advantages of their tokens, [N] each.

    Collective: context parallelism, on the last pipeline stage.

    Args:
        run: the run.
        micro: with values.
        rewards: of every trained token of the whole rows.
        known: [N] bool, tokens of samples with a reward; the others get no return.
    """
    targets = [
        value_targets(
            m,
            row,
            run.policy.sum_over_context,
            discount=run.config.advantages.rl_gamma,
            trace_decay=run.config.critic.gae_lambda,
        )
        for m, row in zip(micro, rewards, strict=True)
    ]
    marked = [
        replace(m, returns=t.returns.masked_fill(~k, math.nan))
        for m, t, k in zip(micro, targets, known, strict=True)
    ]
    return marked, [t.advantages for t in targets]


def value_metrics(run: RLJob, micro: Sequence[PreparedBatch]) -> MetricSet:
    """How well the values of the step foretold its returns. Collective: the last stage."""
    if not run.policy.is_last or not micro:
        return MetricSet({"value/explained_variance": Max()})
    returns = [m.returns for m in micro if m.returns is not None]
    values = [m.old_values for m in micro if m.old_values is not None]
    known = explained_variance(returns, values, run.policy.sum_over_tokens)
    return MetricSet({"value/explained_variance": Max(known)})


def value_loss_function(
    settings: ValueLossSettings, denominators: Denominators
) -> ValueLossFunction:
    """The loss of one optimizer step."""

    def loss(inputs: ValueInputs) -> LossOutputs:
        return value_loss(inputs, settings, denominators)

    return loss


def silent_metrics(loss: ValueLossFunction) -> MetricSet:
    """Names of what the loss reports, for ranks that do not compute it. Local."""
    none = torch.zeros(0)
    owners = Sequences(torch.zeros(0, dtype=torch.int64), none)
    terms = loss(ValueInputs(none, none, none, owners)).terms
    return MetricSet({name: Mean(0.0, 0.0) for name in terms})


def update(run: RLJob, batches: Sequence[tuple[list[PreparedBatch], Denominators]]) -> MetricSet:
    """All optimizer steps of the critic of an RL step. Collective: the training grid.

    Args:
        run: the run; within TRAIN.
        batches: micro-batches of each optimizer step with returns, and the global denominators.
    """
    assert run.critic is not None
    settings = value_loss_settings(run.config)
    metrics = silent_metrics(value_loss_function(settings, Denominators(0, 0)))
    metrics = metrics.merge(value_metrics(run, [m for micro, _ in batches for m in micro]))
    metrics = metrics.merge({"value/grad_norm": Mean(0.0, 0.0), "value/lr": Max()})
    with run.phases.resident(*CRITIC_OWNERS):
        for _ in range(run.plan.batch.iterations):
            for micro, denominators in batches:
                if denominators.tokens == 0:  # as the policy's: nothing to learn from
                    continue
                found = run.critic.forward_backward(
                    micro, value_loss_function(settings, denominators)
                )
                stats = run.critic.step()
                metrics = metrics.merge(found).merge(
                    {
                        "value/grad_norm": Mean(stats.grad_norm, 1.0),
                        "value/lr": Max(stats.learning_rate),
                    }
                )
    return metrics


def export(run: RLJob, step: int) -> None:
    """Write the critic where ``--critic-export-hf`` says. Collective: the world; within TRAIN."""
    options = run.config.critic
    if run.critic is None or not options.critic_export_hf:
        return
    with run.phase("export"), run.phases.resident(Owner.CRITIC):
        training.export_hf(
            run.job, run.critic, options.critic_export_hf, step, options.critic_hf_checkpoint
        )
