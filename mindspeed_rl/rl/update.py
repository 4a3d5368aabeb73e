"""Runs the optimizer steps of an RL step.

Shapes: N trained tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from mindspeed_rl.algorithms.correction import mismatch_terms
from mindspeed_rl.algorithms.histogram import MagnitudeHistogram
from mindspeed_rl.algorithms.kl import adapted_coefficient
from mindspeed_rl.algorithms.losses import LossSettings, policy_loss
from mindspeed_rl.algorithms.selection import StepTokens, select_by_covariance
from mindspeed_rl.algorithms.types import Denominators, LossInputs, LossOutputs, Sequences
from mindspeed_rl.building.models import Models
from mindspeed_rl.colocation.scheduler import DeviceScheduler, Phase
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.alarms import FLAG, GRADIENT_NORM, MAX_SKIPPED, Rollback, ending
from mindspeed_rl.core.memory import CRITIC_OWNERS, MemoryOwner
from mindspeed_rl.metrics.metric_set import Max, Mean, Metric, MetricSet, Total, reduce_metrics
from mindspeed_rl.rl.batches import OptimizerBatch, StepBatches, sample_of_token
from mindspeed_rl.rl.components import Components, RunState
from mindspeed_rl.rl.critic import critic_loss, update_critic
from mindspeed_rl.samples.packing import MicroBatch
from mindspeed_rl.samples.shown_tokens import ShownTokens
from mindspeed_rl.trainer.nonfinite import trace_nonfinite
from mindspeed_rl.trainer.routing_replay import AGREEMENT, ENGINE_AGREEMENT
from mindspeed_rl.trainer.train_engine import LossFunction, TrainEngine, collect_metrics

RATIO = "policy/ratio_max_deviation"
# Of the first optimizer step of a rollout only: 0 where the weights that sampled also computed the
# old log-probs, by the same arithmetic.
FIRST_RATIO = "policy/ratio_first_step_max_deviation"
# The share of the tokens above each quantile of the mismatch.
_MISMATCH_TAILS = {"p50": 0.5, "p99": 0.01, "p999": 0.001}


def update(run: Components, state: RunState, batches: StepBatches) -> MetricSet:
    """Run all optimizer steps of an RL step, the critic's first. Collective: the training grid.

    During ``--critic-warmup-steps`` the policy is not updated.
    """
    run.scheduler.require(Phase.TRAIN, "update")
    metrics, policy, critic = batches.metrics, run.models.policy, run.models.critic
    iterations = run.plan.batch.iterations
    if critic is not None:
        with run.scheduler.onloaded(*CRITIC_OWNERS):
            loss = critic_loss(run.config)
            metrics = metrics.merge(update_critic(critic, loss, batches.updates, iterations))
    warmup = state.step <= run.config.critic.critic_warmup_steps
    updates = [] if warmup else batches.updates
    routes = bool(updates) and run.plan.spec.moe is not None
    metrics = metrics.merge(_empty_metrics(run.config, state.kl_beta, routes))
    skipped = {"optimizer/skipped": Total(float(run.job.world.rank == 0 and not warmup))}
    if not updates:
        metrics = metrics.merge(skipped)
    before = state.version
    gaps = MagnitudeHistogram.empty(run.job.platform.device)
    run.telemetry.tokens.follow(batches.placed.samples)
    with run.scheduler.onloaded(*[MemoryOwner.TEACHERS] * run.config.distillation.full):
        for batch in updates * iterations:
            if batch.denominators.tokens == 0:
                metrics = metrics.merge(skipped)
                continue
            first = state.version == before
            done = update_once(
                *(run.config, policy, state, batch, first, gaps, run.job.log_rank0),
                run.telemetry.tokens,
            )
            metrics = metrics.merge(done.metrics if done.made else done.metrics.merge(skipped))
    metrics = metrics.merge(mismatch_quantiles(gaps, policy))
    if run.config.rl.grpo_kl_beta:
        metrics = metrics.merge({"policy/kl_beta": Max(state.kl_beta)})
        state.kl_beta = next_kl_beta(run.config, state.kl_beta, metrics, run.plan.batch.samples)
    return metrics


def mismatch_quantiles(gaps: MagnitudeHistogram, policy: TrainEngine) -> MetricSet:
    """Return quantiles of |log p(trainer) - log p(engine)|. Collective: ranks of the last stage."""
    found = [-math.inf] * len(_MISMATCH_TAILS)
    if policy.is_last_stage:
        found = gaps.upper_quantiles(list(_MISMATCH_TAILS.values()), policy.all_reduce_dp_cp)
    pairs = zip(_MISMATCH_TAILS, found, strict=True)
    return MetricSet({f"mismatch/{name}_abs_logprob": Max(edge) for name, edge in pairs})


def _empty_metrics(config: RLRunConfig, kl_beta: float, routes: bool) -> MetricSet:
    """Return zero metrics with the names that updates report, on every rank and in every step.

    Args:
        config: Flags of the run.
        kl_beta: Present coefficient of the KL.
        routes: Whether the updates choose experts.
    """
    loss = step_loss(config, kl_beta, Denominators(0, 0), True)
    metrics = empty_loss_metrics(loss).merge({FIRST_RATIO: Max()})
    if routes:
        metrics = metrics.merge({AGREEMENT: Mean(0.0, 0.0)})
    if routes and config.rl.rl_routing_replay == "rollout":
        metrics = metrics.merge({ENGINE_AGREEMENT: Mean(0.0, 0.0)})
    return metrics


@dataclass(frozen=True, slots=True)
class Update:
    """What a rank knows of one optimizer step, and whether it was made."""

    metrics: MetricSet
    made: bool


def update_once(
    config: RLRunConfig,
    policy: TrainEngine,
    state: RunState,
    batch: OptimizerBatch,
    first_update: bool,
    gaps: MagnitudeHistogram,
    tell: Callable[[str], None],
    shown: ShownTokens,
) -> Update:
    """Run one optimizer step, unless its gradient norm forbids it. Collective: the training grid.

    The log-prob differences between trainer and engine are counted in ``gaps``, and values of
    tokens that people will see kept in ``shown``.

    Raises:
        FloatingPointError: Gradients are not finite, and ``--rl-alarms`` does not skip them.
        Rollback: An alarm of the gradient norm asks for an earlier checkpoint.
        RuntimeError: An alarm of the gradient norm ends the run.
    """
    if config.policy_loss.loss.selects:
        old_is_present = first_update and config.rl.old_logprob != "rollout"
        batch = select_tokens(config, policy, batch, state.version, old_is_present)
    known: list[torch.Tensor] = []
    loss = step_loss(config, state.kl_beta, batch.denominators, first_update, gaps, known.append)
    found = policy.forward_backward(batch.micro_batches, loss)
    if known:  # on the last stage, a call for each micro-batch in its order
        shown.note(batch.micro_batches, known, counts=policy.is_metrics_rank)
    norm = policy.gradient_norm()
    if _is_skipped(config, policy, state, batch, norm, tell):
        policy.discard_gradients()
        # Means and maxima of numbers that are not finite would be none, either.
        return Update(found if math.isfinite(norm) else MetricSet(), made=False)
    stats = policy.step()
    state.version += 1
    if first_update and RATIO in found:
        found = found.merge({FIRST_RATIO: found[RATIO]})
    of_optimizer: dict[str, Metric] = {
        "optimizer/skipped": Total(0.0),
        GRADIENT_NORM: Mean(stats.grad_norm, 1.0),
        "optimizer/lr": Max(stats.learning_rate),
    }
    return Update(found.merge(of_optimizer), made=True)


def _is_skipped(
    config: RLRunConfig,
    policy: TrainEngine,
    state: RunState,
    batch: OptimizerBatch,
    norm: float,
    tell: Callable[[str], None],
) -> bool:
    """Judge the gradient norm of an update; say whether to skip it. Collective as the trace.

    Raises:
        FloatingPointError, Rollback, RuntimeError: See :func:`update_once`.
    """
    alarm = state.gradients.see(config.alarms.rules, norm)
    if alarm is None:
        return False
    if not math.isfinite(norm):
        # Without the mismatch, whose tokens are counted already.
        loss = step_loss(config, state.kl_beta, batch.denominators, False)
        origin = trace_nonfinite(policy, batch.micro_batches, loss)
        alarm = replace(alarm, text=f"{alarm.text}; {origin}")
    if alarm.rule.action == "rollback":
        raise Rollback(alarm, state.step)
    if alarm.rule.action == "stop":
        kind = RuntimeError if math.isfinite(norm) else FloatingPointError
        raise kind(ending(alarm, state.step))
    skips = alarm.rule.action == "skip"
    tell(f"warning: step {state.step}: {alarm.text}" + ("; the update is skipped" if skips else ""))
    if state.gradients.skipped >= MAX_SKIPPED:
        raise RuntimeError(
            f"step {state.step}: {MAX_SKIPPED} updates in a row were skipped ({FLAG} "
            f"{alarm.rule.name}=skip), so nothing is learned; lower --lr, or go back to an earlier "
            "checkpoint with --load"
        )
    return skips


def loss_settings(config: RLRunConfig, kl_beta: float) -> LossSettings:
    """Return the settings of the policy's loss.

    Args:
        config: Flags of the run.
        kl_beta: Present coefficient of the KL; unused here where the KL is in the reward.
    """
    rl, loss, kl = config.rl, config.policy_loss, config.kl
    return LossSettings(
        policy_loss=loss.rl_policy_loss,
        surrogate=config.surrogate,
        aggregation=loss.aggregation,
        longest=config.rollout.rollout_max_response_length,
        kl_beta=0.0 if kl.rl_kl_in_reward else kl_beta,
        kl_estimator=kl.rl_kl_estimator,
        entropy_weight=rl.grpo_entropy_term_weight,
        correction=config.correction,
        teacher_weight=config.distillation.sampled_weight,
        teacher_kl_weight=config.distillation.full_weight,
    )


def step_loss(
    config: RLRunConfig,
    kl_beta: float,
    denominators: Denominators,
    first_update: bool,
    gaps: MagnitudeHistogram | None = None,
    note: Callable[[torch.Tensor], None] | None = None,
) -> LossFunction:
    """Return the loss of one optimizer step, which reports the mismatch where it can compute it.

    It compares the engine's log-probs with the trainer's under the weights that sampled: the old
    ones unless they are the engine's own, else the present ones until the first update. Samples of
    earlier steps are left out: their difference is learning. Differences are counted in ``gaps``;
    ``note`` gets the trainer's log-probs.
    """
    old_is_trainers = config.rl.old_logprob != "rollout"
    settings: LossSettings = loss_settings(config, kl_beta)

    def loss(inputs: LossInputs) -> LossOutputs:
        outputs = policy_loss(inputs, settings, denominators)
        known = inputs.old_logprobs if old_is_trainers else None
        if known is None and first_update:
            known = inputs.logprobs.detach()
        if known is None:
            return outputs
        engine, fresh = inputs.rollout_logprobs, inputs.on_policy_mask
        if note is not None:
            note(known)
        if gaps is not None:
            gaps.add(known - engine, fresh)
        return replace(outputs, terms={**outputs.terms, **mismatch_terms(known, engine, fresh)})

    return loss


def empty_loss_metrics(loss: LossFunction) -> MetricSet:
    """Return zero metrics with the names that a loss reports, for ranks without it. Local."""
    none, flags = torch.zeros(0), torch.zeros(0, dtype=torch.bool)
    owners = Sequences(torch.zeros(0, dtype=torch.int64), none)
    inputs = LossInputs(
        none, none, none, none, none, none, owners, flags, teacher_logprobs=none, teacher_kl=none
    )
    return collect_metrics([loss(inputs)])


def selection_seed(seed: int, update: int) -> int:
    """Return the seed that selects tokens at random in the optimizer step of this number."""
    return seed * 1_000_003 + update


def select_tokens(
    config: RLRunConfig,
    policy: TrainEngine,
    batch: OptimizerBatch,
    update: int,
    old_is_present: bool,
) -> OptimizerBatch:
    """Select tokens over the whole optimizer step, by their covariance under the present policy.

    Collective: the training grid.

    Args:
        config: Flags of the run, which say which tokens to select, and how many.
        policy: The present policy.
        batch: Batch with old log-probs and advantages.
        update: Number of the optimizer step in the run.
        old_is_present: Whether the old log-probs are the present policy's; if not, it needs a pass.
    """
    micro = batch.micro_batches
    current: Sequence[torch.Tensor | None]
    if old_is_present:
        current = [m.columns.get("old_logprobs") for m in micro]
    else:
        current = policy.logprobs(micro)
    if not policy.is_last_stage:
        return batch
    select = partial(
        select_by_covariance,
        selection=config.policy_loss.loss.selection,
        settings=config.surrogate,
        seed=selection_seed(config.train.seed, update),
        reduce=policy.all_reduce_dp_cp,
    )
    return replace(batch, micro_batches=with_covariance_mask(micro, current, select))


def with_covariance_mask(
    micro: Sequence[MicroBatch],
    current: Sequence[torch.Tensor | None],
    select: Callable[[StepTokens], list[torch.Tensor]],
) -> list[MicroBatch]:
    """Return the micro-batches of an optimizer step with their selected tokens marked.

    On the last pipeline stage. Collective as ``select``.

    Args:
        micro: Micro-batches of this rank, with old log-probs and advantages.
        current: Log-probs of the present policy.
        select: Says which tokens are selected, see :func:`select_by_covariance`.
    """
    logprobs = [c for c in current if c is not None]
    own_id = {i: i for m in micro for i in m.sample_ids}
    tokens = StepTokens(
        logprobs=logprobs,
        log_ratio=[c - m.column("old_logprobs") for c, m in zip(logprobs, micro, strict=True)],
        advantages=[m.column("advantages") for m in micro],
        sample_ids=[sample_of_token(m, own_id) for m in micro],
        places=[m.positions[m.trained] for m in micro],
    )
    pairs = zip(micro, select(tokens), strict=True)
    return [m.with_column("covariance_mask", chosen) for m, chosen in pairs]


def next_kl_beta(
    config: RLRunConfig, kl_beta: float, metrics: MetricSet, num_samples: int
) -> float:
    """Return the KL coefficient of the next step, moved towards ``--rl-kl-target``.

    A step that trained on no token leaves it unchanged. Collective: the world.
    """
    flags = config.kl
    if not flags.rl_kl_target:
        return kl_beta
    name = "reward/kl" if flags.rl_kl_in_reward else "loss/kl"
    kl = reduce_metrics(MetricSet({name: metrics[name]}))[name]
    if math.isnan(kl):
        return kl_beta
    return adapted_coefficient(
        kl_beta,
        kl,
        target=flags.rl_kl_target,
        horizon=flags.rl_kl_horizon,
        num_samples=num_samples,
    )


def refresh_reference(models: Models, scheduler: DeviceScheduler, interval: int, step: int) -> None:
    """Copy the policy to the reference every ``interval`` steps; 0: never. Local; in TRAIN."""
    if models.reference is None or not interval or step % interval:
        return
    with scheduler.onloaded(MemoryOwner.REFERENCE):
        models.refresh_reference()
