"""Computes the advantage of every token from the rewards of a step.

Shapes: N trained tokens of a micro-batch. Columns of tokens exist on the last pipeline stage alone,
where the loss is.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from mindspeed_rl.algorithms.advantages import (
    AdvantageSettings,
    Estimator,
    GroupRewards,
    TokenRewards,
)
from mindspeed_rl.algorithms.kl import kl_estimate
from mindspeed_rl.algorithms.token_advantages import (
    ValueTargets,
    rewards_to_tokens,
    whitened,
)
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.metrics.metric_set import Mean, MetricSet
from mindspeed_rl.rl.batches import StepBatches, sample_of_token
from mindspeed_rl.rl.components import Components, RunState
from mindspeed_rl.rl.critic import values_of_rows
from mindspeed_rl.samples.packing import MicroBatch
from mindspeed_rl.samples.rollout_info import RolloutInfo
from mindspeed_rl.trainer.train_engine import TrainEngine


def compute_advantages(
    run: Components,
    state: RunState,
    batches: StepBatches,
    samples: Sequence[RolloutInfo],
    greedy: Sequence[float] | None = None,
) -> StepBatches:
    """Add the advantages of all trained tokens, and a critic's targets. Collective: last stage.

    Args:
        run: Parts of the run.
        state: State of the run: the coefficient of the KL, and the step, which seeds the control
            experiment.
        batches: Batches, with old and reference log-probs where the KL is in the reward.
        samples: Samples of the step, in the order of the groups.
        greedy: Reward of the greedy response to each prompt, where the estimator needs it.

    Raises:
        FloatingPointError: an advantage is not finite; names samples.
    """
    estimator, settings = run.config.advantages.estimator, run.config.estimation
    kl_in_reward = run.config.kl.rl_kl_in_reward
    if kl_in_reward:
        batches = batches.with_metrics(MetricSet({"reward/kl": Mean(0.0, 0.0)}))
    if not samples:
        return batches
    rewards = torch.tensor(shaped_rewards(run.config, samples, state.step))
    penalties: list[torch.Tensor] | None = None
    micro, position = batches.micro_batches, {s.sample_id: i for i, s in enumerate(samples)}
    owners = [sample_of_token(m, position) for m in micro]
    tokens = _Tokens(micro, owners, run.models.policy, position, run.job.platform.device)
    if kl_in_reward and run.models.policy.is_last_stage:
        kl = [_kl(run.config, m) for m in tokens.micro]
        batches = batches.with_metrics(MetricSet({"reward/kl": tokens.mean(kl)}))
        penalties = [state.kl_beta * k for k in kl]
        if estimator.of_tokens is None:
            rewards = rewards - tokens.sums_of_samples(penalties).cpu()
    values = estimator.formula(
        group_rewards(rewards, samples, run.plan.batch.group_size, greedy), settings
    ).flatten()
    _refuse_not_finite(
        [s.sample_id for s, v in zip(samples, values.tolist(), strict=True) if not math.isfinite(v)]
    )
    if not run.models.policy.is_last_stage:
        return batches
    counted = tokens.spread(~rewards.isnan())
    if estimator.of_tokens is None:
        advantages = tokens.spread(values)
    else:
        rows = tokens.rewards(values, penalties)
        found = tokens.estimates(estimator, settings, rows, counted)
        advantages = [t.advantages for t in found]
        if estimator.needs_critic:
            batches = batches.with_column("returns", [t.returns for t in found])
    if estimator.whiten:
        advantages = whitened(advantages, counted, run.models.policy.all_reduce_dp_cp)
    tokens.refuse_not_finite(advantages)
    return batches.with_column("advantages", advantages)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The trained tokens of this rank and the samples that they belong to.

    Attributes:
        micro: Micro-batches of all optimizer steps.
        owners: [N] int64 for each micro-batch: the index in the step of each token's sample.
        policy: Engine that sums over the ranks with the other tokens.
        position: Index of each sample in the step, by sample id.
        device: Device of the tokens.
    """

    micro: list[MicroBatch]
    owners: list[torch.Tensor]
    policy: TrainEngine
    position: dict[int, int]
    device: torch.device

    def spread(self, of_sample: torch.Tensor) -> list[torch.Tensor]:
        """Give every token the value of its sample: [samples] -> [N] for each micro-batch."""
        values = of_sample.to(self.device)
        return [values[owner] for owner in self.owners]

    def mean(self, parts: Sequence[torch.Tensor]) -> Mean:
        """Return this rank's part of a mean: 0 of 0 if another rank counts the same tokens."""
        if not self.policy.is_metrics_rank:
            return Mean(0.0, 0.0)
        return Mean(float(sum(p.sum() for p in parts)), float(sum(p.numel() for p in parts)))

    def sums_of_samples(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return [samples]: the sum over all tokens of each, on whatever ranks. Collective."""
        sums = torch.zeros(len(self.position), device=self.device)
        for owner, part in zip(self.owners, parts, strict=True):
            sums.index_add_(0, owner, part)
        return self.policy.all_reduce_dp_cp(sums)

    def rewards(
        self, of_sample: torch.Tensor, penalties: Sequence[torch.Tensor] | None
    ) -> list[torch.Tensor]:
        """Return rewards of all trained tokens of each whole row, equal on ranks that share it.

        The reward of a sample is at its last token; the KL of each token is subtracted. Sums over
        the tokens of a sample need all of them, so penalties are gathered from those ranks.
        """
        values = of_sample.to(self.device)
        rows = []
        for number, m in enumerate(self.micro):
            order = torch.tensor(
                [self.position[i] for i in m.sample_ids], dtype=torch.int64, device=self.device
            )
            row = rewards_to_tokens(values[order], m.num_trained)
            if penalties is not None:
                own = torch.zeros_like(row).index_copy_(
                    0, m.trained_index.long(), penalties[number]
                )
                row = row - self.policy.all_reduce_row(m, own)
            rows.append(row)
        return rows

    def estimates(
        self,
        estimator: Estimator,
        settings: AdvantageSettings,
        rows: Sequence[torch.Tensor],
        counted: Sequence[torch.Tensor],
    ) -> list[ValueTargets]:
        """Return advantages and returns, each [N] for each micro-batch. Collective.

        The estimator computes whole rows, of which this rank keeps the values of its tokens. Those
        that are not ``counted``, as their samples have no reward, get no target: a return of NaN.
        """
        assert estimator.of_tokens is not None
        found = []
        for m, row, known in zip(self.micro, rows, counted, strict=True):
            values = None
            if estimator.needs_critic:
                values = values_of_rows(m, partial(self.policy.all_reduce_row, m))
            whole = estimator.of_tokens(TokenRewards(row, m.num_trained, values), settings)
            own = m.trained_index
            returns = whole.returns[own].masked_fill(~known, math.nan)
            found.append(ValueTargets(whole.advantages[own], returns))
        return found

    def refuse_not_finite(self, advantages: Sequence[torch.Tensor]) -> None:
        """Raise a FloatingPointError that names samples with tokens that are not finite. Local."""
        finite = torch.stack([part.isfinite().all() for part in advantages]).tolist()
        for m, part, good in zip(self.micro, advantages, finite, strict=True):
            bad = [] if good else sorted(set(m.sequence_of[~part.isfinite()].tolist()))
            _refuse_not_finite([m.sample_ids[i] for i in bad])


def shaped_rewards(config: RLRunConfig, samples: Sequence[RolloutInfo], step: int) -> list[float]:
    """Return the reward of every sample with its length penalty; equal on all ranks. Local.

    The control experiment permutes the rewards.
    """
    rewards = [s.reward + length_penalty(config, s) for s in samples]
    if config.rl.rl_control == "shuffled-rewards":
        random.Random(f"{config.train.seed}/{step}").shuffle(rewards)
    return rewards


def length_penalty(config: RLRunConfig, sample: RolloutInfo) -> float:
    """Return what ``--rl-overlong-buffer`` adds to the reward of a sample: 0 or less.

    Within the last tokens before the limit it falls linearly from 0 to minus
    ``--rl-overlong-penalty``: soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, section
    3.4). A response that a cap cut is punished as one at the limit.
    """
    buffer = config.sampling.rl_overlong_buffer
    if not buffer:
        return 0.0
    if config.balance.response_length_cap_factor and not sample.stopped:
        return -config.sampling.rl_overlong_penalty
    over = sample.num_tokens - (config.rollout.rollout_max_response_length - buffer)
    return -config.sampling.rl_overlong_penalty * min(max(over / buffer, 0.0), 1.0)


def group_rewards(
    rewards: torch.Tensor,
    samples: Sequence[RolloutInfo],
    group_size: int,
    greedy: Sequence[float] | None,
) -> GroupRewards:
    """Group [samples] rewards with what estimators need besides them."""
    lengths = torch.tensor([s.num_tokens for s in samples]).view(-1, group_size)
    baselines = None if greedy is None else torch.tensor(list(greedy))
    return GroupRewards(rewards.view(-1, group_size), lengths, baselines)


def _refuse_not_finite(sample_ids: Sequence[int]) -> None:
    if sample_ids:
        raise FloatingPointError(f"advantages of samples {sample_ids[:8]} are not finite")


def _kl(config: RLRunConfig, micro: MicroBatch) -> torch.Tensor:
    """Return [N]: the estimated KL of the old policy to the reference."""
    old, reference = micro.column("old_logprobs"), micro.column("ref_logprobs")
    return kl_estimate(old, reference, config.kl.rl_kl_estimator)
