"""The stages of one RL step: collect and update; :mod:`rl_batch` is between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mindspeed_rl.algorithms.correction import mismatch_terms
from mindspeed_rl.algorithms.kl import adapted_coefficient
from mindspeed_rl.algorithms.losses import policy_loss
from mindspeed_rl.algorithms.selection import upper_quantile
from mindspeed_rl.algorithms.settings import advantage_estimator, loss_settings
from mindspeed_rl.algorithms.types import (
    Denominators,
    LossInputs,
    LossOutputs,
    MaxTerm,
    Sequences,
)
from mindspeed_rl.experience.samples import UNCACHED, Sample, SampleKey, exchange_table
from mindspeed_rl.experience.tensor_cache import TensorCache
from mindspeed_rl.memory.owners import Owner
from mindspeed_rl.observability.metrics import Max, Mean, MetricSet, Total, reduce_metrics
from mindspeed_rl.orchestration import rl_critic, rl_samples
from mindspeed_rl.orchestration.rl_balance import observe_lengths
from mindspeed_rl.orchestration.rl_batch import (
    StepBatches,
    UpdateBatch,
    length_penalty,
    select_tokens,
)
from mindspeed_rl.orchestration.rl_job import RLJob
from mindspeed_rl.orchestration.rl_partial import draw_complete
from mindspeed_rl.orchestration.rl_resample import Group, fill_step, numbered, take_complete
from mindspeed_rl.orchestration.rl_rollout import generate, rollouts_of
from mindspeed_rl.phases.machine import Phase
from mindspeed_rl.trainer.routing_replay import AGREEMENT, ENGINE_AGREEMENT
from mindspeed_rl.trainer.train_engine import LossFunction
from mindspeed_rl.types import Prompt

RATIO = "policy/ratio_max_deviation"
# Of the first optimizer step of a rollout alone: 0 where old log-probs are those of the weights
# that sampled, by the same arithmetic.
FIRST_RATIO = "policy/ratio_first_step_max_deviation"


@dataclass(frozen=True, slots=True)
class Collected:
    """The rollouts of a step on every rank, and what this rank has to report about them.

    Attributes:
        samples: to train on, siblings of a prompt together, numbered by their place.
        drawn: all that were sampled in this step, for the report; ``samples`` where earlier steps
            sampled all that is trained on.
        metrics: of the rewards.
        greedy: reward of the greedy response to each prompt, less its penalty for length, NaN where
            it abstained; ``None`` unless the advantage estimator asks for them.
    """

    samples: list[Sample]
    drawn: list[Sample]
    metrics: MetricSet
    greedy: list[float] | None = None


def collect(run: RLJob, step: int) -> Collected:
    """Sample and score the rollouts of a step. Collective: the world; within ROLLOUT."""
    metrics, num_drawn = run.phases.sync_metrics, 0
    carried = (*run.surplus, *run.pending)
    run.cache.begin_step(step, [s.key for group in carried for s in group])
    partial, size = run.config.balance.partial_rollout_tokens > 0, run.plan.batch.group_size

    def sample(
        prompts: Sequence[Prompt], attempt: int, begun: Sequence[Sample | None] = ()
    ) -> list[Sample]:
        """One response to each, or more of one that has begun."""
        nonlocal metrics, num_drawn
        settings = run.sampling(run.config.rl.rl_default_temperature)
        first = SampleKey(step, num_drawn)
        drawn = rollouts_of(
            run, prompts, step, settings, attempt, first=first, lengths=run.lengths, begun=begun
        )
        experts = rl_samples.experts_column(run)
        rl_samples.store(run.cache, drawn.rollouts, drawn.samples, experts)
        num_drawn += len(prompts)
        metrics = metrics.merge(drawn.metrics)
        return drawn.samples

    def one_pass(prompts: Sequence[Prompt], begun: Sequence[Sample | None]) -> list[Sample]:
        """The seeds of each pass of a step are its own."""
        return sample(prompts, num_drawn, begun)

    def draw(needed: int, in_flight: int, attempt: int) -> list[Group]:
        """Complete groups: of new prompts, or in partial rollouts of all that are in flight."""
        nonlocal metrics
        if partial:
            found, about = draw_complete(run, needed, in_flight, one_pass)
            metrics = metrics.merge(about)
            return found
        indices = run.sampler.next(in_flight)
        samples = sample([p for i in indices for p in [run.prompts[i]] * size], attempt)
        return [samples[i : i + size] for i in range(0, len(samples), size)]

    if run.config.sampling.grpo_filter_groups_with_same_reward:
        filled = fill_step(run, draw)
        groups, drawn = filled.groups, filled.drawn
        metrics = metrics.merge(filled.metrics)
    elif partial:
        groups, drawn = take_complete(run, draw)
    else:
        groups = drawn = draw(run.plan.batch.prompts, run.plan.batch.prompts, 0)
    greedy = None
    if advantage_estimator(run.config).needs_greedy:
        prompts = [run.prompts[group[0].prompt_index] for group in groups]
        answers = rollouts_of(run, prompts, step, run.sampling(0.0))
        # shaped as the samples are, else a long greedy response would be a baseline too high
        greedy = [s.reward + length_penalty(run, s) for s in answers.samples]
        metrics = metrics.merge(answers.metrics)
    everything, trained = numbered(drawn), numbered(groups)
    observe_lengths(run, everything)
    return Collected(trained, everything or trained, metrics, greedy)


def update(run: RLJob, batches: StepBatches, *, critic_only: bool = False) -> MetricSet:
    """All optimizer steps of an RL step, the critic's first. Collective: the training grid.

    With ``critic_only`` the policy stays as it is.
    """
    run.phases.require(Phase.TRAIN, "update")
    run.num_steps += 1
    metrics = batches.metrics
    if run.critic is not None:
        shares = [(b.micro_batches, b.denominators) for b in batches.updates]
        metrics = metrics.merge(rl_critic.update(run, shares))
    updates = [] if critic_only else batches.updates
    if not updates:
        nothing = silent_metrics(step_loss(run, Denominators(0, 0), True)).merge(
            {FIRST_RATIO: Max()}
        )
        skipped = float(run.rank == 0 and not critic_only)
        metrics = metrics.merge(nothing).merge({"optimizer/skipped": Total(skipped)})
    before = run.version
    gaps: list[torch.Tensor] = []
    for _ in range(run.plan.batch.iterations):
        for batch in updates:
            metrics = metrics.merge(update_once(run, batch, run.version == before, gaps))
    if run.policy.is_last:
        gaps = gaps or [torch.zeros(0, device=run.job.platform.device)]
        p99 = Max(upper_quantile(gaps, 0.01, run.policy.sum_over_tokens))
    metrics = metrics.merge({"mismatch/p99_abs_logprob": p99 if run.policy.is_last else Max()})
    if run.config.rl.grpo_kl_beta:
        metrics = metrics.merge({"policy/kl_beta": Max(run.kl_beta)})
        adapt_kl(run, metrics)
    return metrics


def refresh_reference(run: RLJob, step: int) -> None:
    """The policy becomes the reference every ``--ref-update-interval`` steps. Local; in TRAIN."""
    interval = run.config.rl.ref_update_interval
    if run.reference is None or not interval or step % interval:
        return
    with run.phases.resident(Owner.REFERENCE), torch.no_grad():
        present = run.policy.named_parameters()
        for name, param in run.reference.named_parameters().items():
            param.copy_(present[name])
        run.reference.weights_changed()


def adapt_kl(run: RLJob, metrics: MetricSet) -> None:
    """Move the KL coefficient of the next step towards ``--rl-kl-target``. Collective: the world.

    A step that trained on no token leaves it as it is.
    """
    flags = run.config.kl
    if not flags.rl_kl_target:
        return
    name = "reward/kl" if flags.rl_kl_in_reward else "loss/kl"
    kl = reduce_metrics(MetricSet({name: metrics[name]}))[name]
    if not math.isnan(kl):
        run.kl_beta = adapted_coefficient(
            run.kl_beta,
            kl,
            target=flags.rl_kl_target,
            horizon=flags.rl_kl_horizon,
            num_samples=run.plan.batch.samples,
        )


def step_loss(
    run: RLJob,
    denominators: Denominators,
    first_update: bool,
    gaps: list[torch.Tensor] | None = None,
) -> LossFunction:
    """The loss of one optimizer step, with the mismatch where it can be told.

    The trainer's log-probs under the weights that sampled are the old log-probs, unless those are
    the engine's own, or the present ones as long as no update has been made. Samples of an earlier
    step are left out: their difference is learning. What is compared is appended to ``gaps``.
    """
    old_is_trainers = run.config.rl.old_logprob != "rollout"
    settings = loss_settings(run.config, run.kl_beta)

    def loss(inputs: LossInputs) -> LossOutputs:
        outputs = policy_loss(inputs, settings, denominators)
        known = inputs.old_logprobs if old_is_trainers else None
        if known is None and first_update:
            known = inputs.logprobs.detach()
        if known is None:
            return outputs
        engine = inputs.rollout_logprobs
        if inputs.fresh is not None:
            known, engine = known[inputs.fresh], engine[inputs.fresh]
        if gaps is not None:
            gaps.append((known - engine).abs())
        return replace(outputs, terms={**outputs.terms, **mismatch_terms(known, engine)})

    return loss


def silent_metrics(loss: LossFunction) -> MetricSet:
    """Names and kinds of what a loss reports, for ranks that do not compute it. Local."""
    none, flags = torch.zeros(0), torch.zeros(0, dtype=torch.bool)
    owners = Sequences(torch.zeros(0, dtype=torch.int64), none)
    inputs = LossInputs(none, none, none, none, none, none, owners, flags)
    terms = loss(inputs).terms
    return MetricSet(
        {n: Max() if isinstance(term, MaxTerm) else Mean(0.0, 0.0) for n, term in terms.items()}
    )


def update_once(
    run: RLJob, batch: UpdateBatch, first_update: bool, gaps: list[torch.Tensor]
) -> MetricSet:
    """One optimizer step; a batch without a single trained token is skipped and counted.

    Differences between trainer and engine are appended to ``gaps``.
    """
    silent = silent_metrics(step_loss(run, batch.denominators, True)).merge({FIRST_RATIO: Max()})
    if run.plan.spec.moe:
        silent = silent.merge({AGREEMENT: Mean(0.0, 0.0)})
    if run.config.rl.rl_routing_replay == "rollout":
        silent = silent.merge({ENGINE_AGREEMENT: Mean(0.0, 0.0)})
    first = run.rank == 0
    if batch.denominators.tokens == 0:
        return silent.merge({"optimizer/skipped": Total(float(first))})
    if run.config.policy_loss.selects:
        batch = select_tokens(run, batch, first_update)
    loss = step_loss(run, batch.denominators, first_update, gaps)
    found = run.policy.forward_backward(batch.micro_batches, loss)
    stats = run.policy.step()
    run.version += 1
    if first_update and RATIO in found:
        silent = silent.merge({FIRST_RATIO: found[RATIO]})
    return silent.merge(found).merge(
        {
            "optimizer/skipped": Total(0.0),
            "optimizer/grad_norm": Mean(stats.grad_norm, 1.0),
            "optimizer/lr": Max(stats.learning_rate),
        }
    )


def sample_metrics(run: RLJob, samples: Sequence[Sample]) -> dict[str, float]:
    """Rewards and lengths of a step, computed alike on every rank."""
    known = [s.reward for s in samples if not math.isnan(s.reward)]
    lengths = [s.num_tokens for s in samples]
    values = {
        "reward/mean": sum(known) / max(1, len(known)),
        "reward/max": max(known, default=math.nan),
        "reward/min": min(known, default=math.nan),
        "reward/abstained": float(len(samples) - len(known)),
        **quantiles("reward/", known),
        **quantiles("response/length_", lengths),
        "response/length_min": float(min(lengths, default=0)),
        "response/length_mean": sum(lengths) / max(1, len(lengths)),
        "response/length_max": float(max(lengths, default=0)),
        "response/truncated_fraction": sum(not s.stopped for s in samples) / max(1, len(samples)),
        "reward/degenerate_groups": _degenerate(samples, run.plan.batch.group_size),
    }
    for i, name in enumerate(run.part_names):
        scores = [s.parts[i] for s in samples if not math.isnan(s.parts[i])]
        values[f"reward/{name}"] = sum(scores) / max(1, len(scores))
    return values


def quantiles(prefix: str, values: Sequence[float]) -> dict[str, float]:
    """The 10th, 50th and 90th percentile: the smallest value that at least this share reaches."""
    ordered = sorted(values)
    places = {q: max(0, math.ceil(len(ordered) * q / 100) - 1) for q in (10, 50, 90)}
    return {f"{prefix}p{q}": float(ordered[i]) if ordered else math.nan for q, i in places.items()}


def _degenerate(samples: Sequence[Sample], group_size: int) -> float:
    """Share of groups whose rewards are all equal: they teach nothing."""
    groups = [samples[i : i + group_size] for i in range(0, len(samples), group_size)]
    return sum(len({s.reward for s in group}) == 1 for group in groups) / max(1, len(groups))


PROBE_TOKENS = 24


def probe(run: RLJob) -> float:
    """Compare log-probs of engine and trainer on one prompt per engine.

    Bit-equal parameters do not prove that an engine computes with them: derived tensors (rotary
    tables, absorbed projections) may be stale. Collective: the world; within TRAIN, and back.

    Returns:
        The mean |difference| over the sampled tokens.

    Raises:
        RuntimeError: it exceeds ``--rl-sync-check-tol``.
    """
    run.phases.to_rollout(run.version)
    engines = run.plan.engine.num_groups
    prompts = [run.prompts[i % len(run.prompts)] for i in range(engines)]
    settings = run.sampling(run.config.rl.rl_default_temperature)
    settings = replace(
        settings, max_response_tokens=min(PROBE_TOKENS, settings.max_response_tokens)
    )
    with run.phase("probe"):
        mine = generate(run, prompts, step=0, settings=settings)
        engine = run.plan.engine
        known, copies = (mine, []) if run.leads_engine else ([], mine)
        samples = exchange_table(
            known, engine.group_of(run.rank), (), engines, UNCACHED,
            copies=copies, num_copies=engine.tp,
        )  # fmt: skip
        cache = TensorCache(run.job.platform.device)
        experts = rl_samples.experts_column(run)
        rl_samples.store(cache, mine, samples, experts)
    run.phases.to_train()
    with run.phase("probe"):
        placed = rl_samples.place(run, samples, cache)
        gaps = [
            (logp - prepared.batch.rollout_logprobs).abs()
            for micro in rl_samples.pack_placed(run, placed, run.policy)
            for logp, prepared in zip(run.policy.logprobs(micro), micro, strict=True)
            if logp is not None
        ]
        mean = MetricSet({"probe": Mean(float(sum(g.sum() for g in gaps)), sum(map(len, gaps)))})
        gap = reduce_metrics(mean)["probe"]
    limit = run.config.sync_check_tol
    if not gap <= limit:
        raise RuntimeError(
            f"probe: mean |log p(trainer) - log p(engine)| is {gap:.3g}, above "
            f"--rl-sync-check-tol {limit:g}, although the weights are bit-equal: the engine "
            "computes something else than the trainer"
        )
    return gap
