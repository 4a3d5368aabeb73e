"""From the samples of an RL step to the batches of its optimizer steps.

Shapes: N trained tokens of a micro-batch. The log-probs and advantages of tokens exist on the last
pipeline stage alone, where the loss is.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from mindspeed_rl.algorithms.advantages import GroupRewards
from mindspeed_rl.algorithms.kl import kl_estimate
from mindspeed_rl.algorithms.overlong import overlong_penalty
from mindspeed_rl.algorithms.selection import (
    CovarianceSettings,
    StepTokens,
    select_by_covariance,
)
from mindspeed_rl.algorithms.settings import advantage_estimator, covariance_settings
from mindspeed_rl.algorithms.token_advantages import (
    discounted_sums,
    rewards_to_tokens,
    whitened,
)
from mindspeed_rl.algorithms.types import Denominators
from mindspeed_rl.memory.owners import Owner
from mindspeed_rl.observability.metrics import Max, Mean, MetricSet
from mindspeed_rl.rl import batches as rl_samples
from mindspeed_rl.rl import critic as rl_critic
from mindspeed_rl.rl.build import RLJob
from mindspeed_rl.samples.rollout_info import Sample
from mindspeed_rl.trainer.prepared import PreparedBatch
from mindspeed_rl.trainer.train_engine import TrainEngine


@dataclass(frozen=True, slots=True)
class UpdateBatch:
    """The share of one optimizer step: packed micro-batches and the global denominators."""

    micro_batches: list[PreparedBatch]
    denominators: Denominators


@dataclass(frozen=True, slots=True)
class StepBatches:
    """The batches of all optimizer steps of an RL step, and what making them has to report.

    ``placed`` are the samples that they were made of.
    """

    updates: list[UpdateBatch]
    metrics: MetricSet = field(default_factory=MetricSet)
    placed: rl_samples.Placed | None = None

    def with_micro_batches(self, micro: Sequence[PreparedBatch]) -> StepBatches:
        """The same with others in place of :attr:`micro_batches`, in order."""
        given = iter(micro)
        updates = [
            replace(u, micro_batches=[next(given) for _ in u.micro_batches]) for u in self.updates
        ]
        return replace(self, updates=updates)

    @property
    def micro_batches(self) -> list[PreparedBatch]:
        """Those of all optimizer steps."""
        return [m for update in self.updates for m in update.micro_batches]


def build_batches(run: RLJob, samples: Sequence[Sample]) -> StepBatches:
    """Place, move and pack the samples of each optimizer step, the same plans on all ranks.

    Collective: the training grid.
    """
    with run.phase("exchange"):
        placed = rl_samples.place(run, samples)
    drop = run.config.sampling.rl_overlong_filtering
    packed = rl_samples.pack_placed(run, placed, run.policy, drop_truncated=drop)
    size = run.plan.batch.samples_per_update
    updates = []
    for number, micro in enumerate(packed):
        part = samples[number * size : (number + 1) * size]
        counts = Denominators.of(rl_samples.num_trained(run, s) for s in part)
        updates.append(UpdateBatch(micro, counts))
    return StepBatches(updates, placed.metrics, placed)


def check_on_policy(run: RLJob, samples: Sequence[Sample]) -> None:
    """Every sample must come from the present weights.

    Raises:
        RuntimeError: naming samples of other versions; their ratio would silently be taken as 1.
    """
    stale = [s.sample_id for s in samples if s.num_stale(run.version)]
    if stale:
        raise RuntimeError(
            f"--old-logprob on-policy: samples {stale[:8]} were sampled by other weights than "
            f"version {run.version}; use --old-logprob recompute or rollout"
        )


def annotate(run: RLJob, batches: StepBatches, samples: Sequence[Sample]) -> StepBatches:
    """Add old and reference log-probs and values where needed. Collective: the training grid.

    On-policy old log-probs cost no pass for the first optimizer step of a batch: they are the
    update pass's own (``old_logprobs`` stays ``None``), unless something needs them before it.
    ``forward/*`` counts the passes without gradient, in optimizer batches.
    """
    choice, updates = run.config.rl.old_logprob, []
    early = run.config.kl.rl_kl_in_reward or run.config.policy_loss.selects
    if choice == "on-policy":
        check_on_policy(run, samples)
    num_old = 0
    for i, batch in enumerate(batches.updates):
        micro = batch.micro_batches
        first = i == 0 and run.plan.batch.iterations == 1
        own = choice == "on-policy" and first and not early
        if choice == "rollout":
            micro = [replace(m, old_logprobs=m.batch.rollout_logprobs) for m in micro]
        elif not own:
            old = run.policy.logprobs(micro)
            micro = [replace(m, old_logprobs=o) for m, o in zip(micro, old, strict=True)]
            num_old += 1
        updates.append(replace(batch, micro_batches=micro))
    if run.reference is not None:
        with run.phases.resident(Owner.REFERENCE):
            updates = [_with_reference(run.reference, batch) for batch in updates]
    if run.config.sampling.rl_resample_factor > 1 or run.config.balance.partial_rollout_tokens:
        updates = [_with_ages(run, batch, samples) for batch in updates]
    num_reference = len(updates) if run.reference is not None else 0
    counts = {"forward/old": Max(float(num_old)), "forward/reference": Max(float(num_reference))}
    result = replace(batches, updates=updates, metrics=batches.metrics.merge(counts))
    if run.critic is None:
        return result
    parts = rl_critic.with_values(run, [batch.micro_batches for batch in updates])
    return result.with_micro_batches([m for part in parts for m in part])


def _with_reference(reference: TrainEngine, batch: UpdateBatch) -> UpdateBatch:
    micro = batch.micro_batches
    found = reference.logprobs(micro)
    micro = [replace(m, ref_logprobs=o) for m, o in zip(micro, found, strict=True)]
    return replace(batch, micro_batches=micro)


def _with_ages(run: RLJob, batch: UpdateBatch, samples: Sequence[Sample]) -> UpdateBatch:
    """Marks the tokens that the present weights sampled."""
    device = run.job.platform.device
    index = {s.sample_id: i for i, s in enumerate(samples)}
    # the last position of each sequence that looks at a token of other weights
    read = rl_samples.prompt_lengths(run, samples)
    last = [read[s.prompt_index] - 2 + s.num_stale(run.version) for s in samples]
    last_stale = torch.tensor(last, device=device)

    def fresh(micro: PreparedBatch) -> torch.Tensor:
        positions = micro.batch.positions[micro.batch.loss_mask]
        return positions > last_stale[_owners(micro, index, device)]

    marked = [replace(m, fresh=fresh(m)) for m in batch.micro_batches]
    return replace(batch, micro_batches=marked)


def with_advantages(
    run: RLJob,
    batches: StepBatches,
    samples: Sequence[Sample],
    step: int,
    greedy: Sequence[float] | None = None,
) -> StepBatches:
    """Rewards to the advantage of every token. Collective: the last pipeline stage.

    Args:
        run: the run.
        batches: with old and reference log-probs where the KL is in the reward.
        samples: of the step, in the order of the groups.
        step: seeds the control experiment.
        greedy: rewards of the greedy responses to each prompt, where the estimator asks for them.

    Raises:
        FloatingPointError: an advantage is not finite; names samples.
    """
    estimator, in_reward = advantage_estimator(run.config), run.config.kl.rl_kl_in_reward
    metrics = MetricSet({"reward/kl": Mean(0.0, 0.0)}) if in_reward else MetricSet()
    if not samples:
        return replace(batches, metrics=batches.metrics.merge(metrics))
    device = run.job.platform.device
    rewards = torch.tensor(rewards_of(run, samples, step))
    index = {s.sample_id: i for i, s in enumerate(samples)}
    micro = batches.micro_batches
    penalties: list[torch.Tensor] = []
    if in_reward and run.policy.is_last:
        kl = [_kl(run, m) for m in micro]
        metrics = metrics.merge({"reward/kl": _token_mean(run, kl)})
        penalties = [run.kl_beta * k for k in kl]
        if not estimator.of_tokens:
            rewards = rewards - _sample_sums(run, micro, penalties, index).cpu()
            penalties = []
    values = estimator.of_samples(_group_rewards(run, rewards, samples, greedy)).flatten()
    _refuse_not_finite([s.sample_id for s, v in zip(samples, values.tolist(), strict=True)
                        if not math.isfinite(v)])  # fmt: skip
    result = replace(batches, metrics=batches.metrics.merge(metrics))
    if not run.policy.is_last:
        return result
    of_sample, known = values.to(device), ~rewards.isnan().to(device)
    owners = [_owners(m, index, device) for m in micro]
    parts = [of_sample[owner] for owner in owners]
    counted = [known[owner] for owner in owners]
    if estimator.of_tokens:
        given: list[torch.Tensor | None] = list(penalties) or [None] * len(micro)
        rows = [
            _token_rewards(run, m, of_sample, index, p) for m, p in zip(micro, given, strict=True)
        ]
        micro, parts = _token_advantages(run, micro, rows, counted, estimator.needs_critic)
    if estimator.whiten:
        parts = whitened(parts, counted, run.policy.sum_over_tokens)
    for m, part in zip(micro, parts, strict=True):
        bad = sorted(set(m.batch.sequence_of[~part.isfinite()].tolist()))
        _refuse_not_finite([m.batch.sample_ids[i] for i in bad])
    return result.with_micro_batches(
        [m.with_advantages(part) for m, part in zip(micro, parts, strict=True)]
    )


def rewards_of(run: RLJob, samples: Sequence[Sample], step: int) -> list[float]:
    """The reward of every sample, less its penalty for length; equal on all ranks. Local.

    The control experiment permutes them.
    """
    rewards = [s.reward + length_penalty(run, s) for s in samples]
    if run.config.rl.rl_control == "shuffled-rewards":
        random.Random(f"{run.config.train.seed}/{step}").shuffle(rewards)
    return rewards


def length_penalty(run: RLJob, sample: Sample) -> float:
    """What ``--rl-overlong-buffer`` adds to the reward of a sample: 0 or less."""
    flags = run.config.sampling
    if not flags.rl_overlong_buffer:
        return 0.0
    return overlong_penalty(
        sample.num_tokens,
        limit=run.config.rollout.rollout_max_response_length,
        buffer=flags.rl_overlong_buffer,
        weight=flags.rl_overlong_penalty,
    )


def _group_rewards(
    run: RLJob, rewards: torch.Tensor, samples: Sequence[Sample], greedy: Sequence[float] | None
) -> GroupRewards:
    size = run.plan.batch.group_size
    lengths = torch.tensor([s.num_tokens for s in samples]).view(-1, size)
    baselines = None if greedy is None else torch.tensor(list(greedy))
    return GroupRewards(rewards.view(-1, size), lengths, baselines)


def _refuse_not_finite(sample_ids: Sequence[int]) -> None:
    if sample_ids:
        raise FloatingPointError(f"advantages of samples {sample_ids[:8]} are not finite")


def _kl(run: RLJob, micro: PreparedBatch) -> torch.Tensor:
    """[N] KL of the old policy to the reference."""
    assert micro.old_logprobs is not None and micro.ref_logprobs is not None
    estimator = run.config.kl.rl_kl_estimator
    return kl_estimate(micro.old_logprobs, micro.ref_logprobs, estimator)


def _token_mean(run: RLJob, parts: Sequence[torch.Tensor]) -> Mean:
    """This rank's share; nothing on the tensor-parallel ranks that hold the same tokens."""
    if not run.policy.reports:
        return Mean(0.0, 0.0)
    return Mean(float(sum(p.sum() for p in parts)), float(sum(p.numel() for p in parts)))


def _owners(micro: PreparedBatch, index: Mapping[int, int], device: torch.device) -> torch.Tensor:
    """[N] int64: which sample of the step each token belongs to."""
    order = [index[i] for i in micro.batch.sample_ids]
    return torch.tensor(order, dtype=torch.int64, device=device)[micro.batch.sequence_of]


def _sample_sums(
    run: RLJob,
    micro: Sequence[PreparedBatch],
    parts: Sequence[torch.Tensor],
    index: Mapping[int, int],
) -> torch.Tensor:
    """[samples of the step]: the sum over all tokens of each, on whatever ranks they are."""
    sums = torch.zeros(len(index), device=run.job.platform.device)
    for m, part in zip(micro, parts, strict=True):
        sums.index_add_(0, _owners(m, index, sums.device), part)
    return run.policy.sum_over_tokens(sums)


def _token_rewards(
    run: RLJob,
    micro: PreparedBatch,
    values: torch.Tensor,
    index: Mapping[int, int],
    penalty: torch.Tensor | None,
) -> torch.Tensor:
    """Rewards of all trained tokens of a row: that of a sample at its last, less the KL of each.

    Sums over the tokens of a sample need all of them, so those of all context-parallel ranks are
    put in their places. A sample without a reward has none of its tokens counted: see ``whitened``.
    """
    batch = micro.batch
    order = [index[i] for i in batch.sample_ids]
    rewards = values[torch.tensor(order, dtype=torch.int64, device=values.device)]
    tokens = rewards_to_tokens(rewards, batch.num_trained)
    if penalty is not None:
        row = torch.zeros_like(tokens).index_copy_(0, batch.trained_index, penalty)
        tokens = tokens - run.policy.sum_over_context(row)
    return tokens


def _token_advantages(
    run: RLJob,
    micro: Sequence[PreparedBatch],
    rows: Sequence[torch.Tensor],
    counted: Sequence[torch.Tensor],
    needs_critic: bool,
) -> tuple[list[PreparedBatch], list[torch.Tensor]]:
    """[N] of each row, from the rewards of its tokens; with a critic its targets as well."""
    if needs_critic:
        return rl_critic.with_targets(run, micro, rows, counted)
    return list(micro), [_returns(run, m, row) for m, row in zip(micro, rows, strict=True)]


def _returns(run: RLJob, micro: PreparedBatch, rewards: torch.Tensor) -> torch.Tensor:
    """[N] discounted sums of the rewards of a row's tokens."""
    batch = micro.batch
    discount = run.config.advantages.rl_gamma
    return discounted_sums(rewards, batch.num_trained, discount)[batch.trained_index]


def select_tokens(run: RLJob, batch: UpdateBatch, first_update: bool) -> UpdateBatch:
    """Choose tokens over the whole optimizer step by the present policy.

    The old log-probs are those of the present policy before the first update; later ones, and the
    engine's, need a pass. Collective: the training grid.
    """
    micro = batch.micro_batches
    current: Sequence[torch.Tensor | None]
    if first_update and run.config.rl.old_logprob != "rollout":
        current = [m.old_logprobs for m in micro]
    else:
        current = run.policy.logprobs(micro)
    settings = covariance_settings(run.config, run.version)
    if not run.policy.is_last:
        return batch
    marked = selected_tokens(micro, current, settings, run.policy.sum_over_tokens)
    return replace(batch, micro_batches=marked)


def selected_tokens(
    micro: Sequence[PreparedBatch],
    current: Sequence[torch.Tensor | None],
    settings: CovarianceSettings,
    reduce: Callable[[torch.Tensor], torch.Tensor],
) -> list[PreparedBatch]:
    """The micro-batches of an optimizer step with their selected tokens marked.

    On the last pipeline stage. Collective as ``reduce``.

    Args:
        micro: of this rank, with old log-probs and advantages.
        current: log-probs of the present policy.
        settings: which and how many.
        reduce: sums a tensor over the ranks that hold the other tokens.
    """
    logprobs = [c for c in current if c is not None]
    old = [m.old_logprobs for m in micro if m.old_logprobs is not None]
    sample_ids = {i: i for m in micro for i in m.batch.sample_ids}
    tokens = StepTokens(
        logprobs=logprobs,
        log_ratio=[c - o for c, o in zip(logprobs, old, strict=True)],
        advantages=[m.batch.advantages for m in micro],
        sample_ids=[_owners(m, sample_ids, m.batch.positions.device) for m in micro],
        places=[m.batch.positions[m.batch.loss_mask] for m in micro],
    )
    chosen = select_by_covariance(tokens, settings, reduce)
    return [replace(m, selected=c) for m, c in zip(micro, chosen, strict=True)]
