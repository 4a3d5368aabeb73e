"""The stages of one RL step: collect, build the batch, annotate, update."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mindspeed_rl.algorithms.advantages import group_relative_advantages
from mindspeed_rl.algorithms.losses import clipped_policy_loss, mismatch_terms
from mindspeed_rl.algorithms.types import Denominators, LossInputs, LossOutputs
from mindspeed_rl.data.packing import TrainSample
from mindspeed_rl.experience.exchange import Sample, exchange_rollouts
from mindspeed_rl.memory.owners import Owner
from mindspeed_rl.observability.metrics import Max, Mean, MetricSet, Total, reduce_metrics
from mindspeed_rl.orchestration import training
from mindspeed_rl.orchestration.rl_job import RLJob
from mindspeed_rl.rewards import RewardRequest
from mindspeed_rl.rollout.engine import GenerationRequest, SamplingSettings, request_seed
from mindspeed_rl.trainer.train_engine import LossFunction, PreparedBatch
from mindspeed_rl.types import Completion, Prompt, Rollout

# What a step reports of its update, so that ranks without the loss report the same names.
_LOSS_MEANS = ("loss/policy", "policy/entropy", "policy/clip_fraction",
               "mismatch/mean_abs_logprob", "mismatch/k3")  # fmt: skip
_LOSS_MAXIMA = ("policy/ratio_max_deviation", "mismatch/max_abs_logprob")


@dataclass(frozen=True, slots=True)
class UpdateBatch:
    """The share of one optimizer step: packed micro-batches and the global denominators."""

    micro_batches: list[PreparedBatch]
    denominators: Denominators


@dataclass(frozen=True, slots=True)
class Collected:
    """The rollouts of a step on every rank, and what this rank has to report about them."""

    samples: list[Sample]
    metrics: MetricSet


def collect(run: RLJob, step: int) -> Collected:
    """Sample and score the rollouts of a step. Collective: the world; within ROLLOUT."""
    batch = run.plan.batch
    indices = run.sampler.next(batch.prompts)
    prompts = [p for i in indices for p in [run.prompts[i]] * batch.group_size]
    with run.phase("generate"):
        settings = run.sampling(run.config.rl.rl_default_temperature)
        rollouts = generate(run, prompts, step, settings)
    with run.phase("reward"):
        rollouts, metrics = score(run, rollouts if run.leads_engine else [])
    with run.phase("exchange"):
        samples = exchange_rollouts(rollouts, run.reward_names, batch.samples)
    return Collected(samples, metrics)


def my_share(run: RLJob, num_samples: int) -> range:
    """The sample ids that this rank's engine generates: contiguous, sizes differ by at most 1."""
    engine = run.plan.engine
    replica, count = engine.group_of(run.rank), engine.num_groups
    return range(num_samples * replica // count, num_samples * (replica + 1) // count)


def generate(
    run: RLJob, prompts: Sequence[Prompt], step: int, settings: SamplingSettings
) -> list[Rollout]:
    """Complete this engine's share of ``prompts``; position in the list is the sample id.

    Collective: the ranks of each engine.
    """
    seed = run.config.train.seed
    share = my_share(run, len(prompts))
    requests = [
        GenerationRequest(i, prompts[i].token_ids, request_seed(seed, step, i)) for i in share
    ]
    completions = run.engine.generate(requests, settings, run.version)
    return [Rollout(i, prompts[i], c) for i, c in zip(share, completions, strict=True)]


def response_text(run: RLJob, completion: Completion) -> str:
    """The response as text, special tokens left out; for rewards and people only (R13)."""
    return str(run.tokenizer.decode(list(completion.token_ids), skip_special_tokens=True))


def score(run: RLJob, rollouts: Sequence[Rollout]) -> tuple[list[Rollout], MetricSet]:
    """The same rollouts with their rewards, and how many failed or ran out of time. Local."""
    if run.rewards is None:
        return [], MetricSet({"reward/error_rate": Mean(0, 0), "reward/timeout_rate": Mean(0, 0)})
    requests = [
        RewardRequest(
            sample_id=r.sample_id,
            prompt=r.prompt.text,
            response=response_text(run, r.completion),
            answer=r.prompt.answer,
            finish_reason=r.completion.finish_reason,
            num_response_tokens=len(r.completion.token_ids),
            metadata=r.prompt.metadata,
        )
        for r in rollouts
    ]
    results = run.rewards.score(requests)
    scored = [
        replace(r, reward=result.reward, reward_parts=result.parts)
        for r, result in zip(rollouts, results, strict=True)
    ]
    return scored, MetricSet(
        {
            f"reward/{status}_rate": Mean.of(float(r.status == status) for r in results)
            for status in ("error", "timeout")
        }
    )


def advantages_of(run: RLJob, samples: Sequence[Sample], step: int) -> list[float]:
    """One advantage per sample, equal on all ranks. Local."""
    rewards = [s.reward for s in samples]
    if run.config.rl.rl_control == "shuffled-rewards":
        random.Random(f"{run.config.train.seed}/{step}").shuffle(rewards)
    table = torch.tensor(rewards).view(-1, run.plan.batch.group_size)
    divide = not run.config.rl.grpo_no_std_normalization
    result: list[float] = group_relative_advantages(table, divide_by_std=divide).flatten().tolist()
    if not all(map(math.isfinite, result)):
        bad = [s.sample_id for s, a in zip(samples, result, strict=True) if not math.isfinite(a)]
        raise FloatingPointError(f"advantages of samples {bad[:8]} are not finite")
    return result


def as_train_samples(
    run: RLJob, samples: Sequence[Sample], advantages: Sequence[float] | None = None
) -> list[TrainSample]:
    """Prompt and response of every sample as one sequence to train on. Local."""
    prompts = {i: torch.tensor(run.prompts[i].token_ids) for i in {s.prompt_index for s in samples}}
    return [
        TrainSample(
            sample.sample_id,
            torch.cat([prompts[sample.prompt_index], sample.response]),
            prompts[sample.prompt_index].numel(),
            sample.logprobs,
            advantages[i] if advantages is not None else 0.0,
        )
        for i, sample in enumerate(samples)
    ]


def build_batches(run: RLJob, samples: Sequence[Sample], step: int) -> list[UpdateBatch]:
    """Place and pack the samples of each optimizer step. Local, the same plan on all ranks."""
    train_samples = as_train_samples(run, samples, advantages_of(run, samples, step))
    size = run.plan.batch.samples_per_update
    batches = []
    for start in range(0, len(train_samples), size):
        part = train_samples[start : start + size]
        counts = Denominators(sum(s.length - s.num_prompt_tokens for s in part))
        batches.append(UpdateBatch(training.local_batches(run.job, run.policy, part), counts))
    return batches


def check_on_policy(run: RLJob, samples: Sequence[Sample]) -> None:
    """Every sample must come from the present weights.

    Raises:
        RuntimeError: naming samples of other versions; their ratio would silently be taken as 1.
    """
    stale = [s.sample_id for s in samples if s.weights_version != run.version]
    if stale:
        raise RuntimeError(
            f"--old-logprob on-policy: samples {stale[:8]} were sampled by other weights than "
            f"version {run.version}; use --old-logprob recompute or rollout"
        )


def annotate(
    run: RLJob, batches: list[UpdateBatch], samples: Sequence[Sample]
) -> list[UpdateBatch]:
    """Add old and reference log-probs where they are needed. Collective: the training grid.

    On-policy old log-probs cost no pass for the first optimizer step of a batch: they are the
    update pass's own (``old_logprobs`` stays ``None``).
    """
    choice, annotated = run.config.rl.old_logprob, []
    if choice == "on-policy":
        check_on_policy(run, samples)
    for i, batch in enumerate(batches):
        micro = batch.micro_batches
        own = choice == "on-policy" and i == 0 and run.plan.batch.iterations == 1
        if choice == "rollout":
            micro = [replace(m, old_logprobs=m.batch.rollout_logprobs) for m in micro]
        elif not own:
            old = run.policy.logprobs(micro)
            micro = [replace(m, old_logprobs=o) for m, o in zip(micro, old, strict=True)]
        if run.reference is not None:
            with run.phases.resident(Owner.REFERENCE):
                ref = run.reference.logprobs(micro)
            micro = [replace(m, ref_logprobs=o) for m, o in zip(micro, ref, strict=True)]
        annotated.append(replace(batch, micro_batches=micro))
    return annotated


def update(run: RLJob, batches: Sequence[UpdateBatch]) -> MetricSet:
    """All optimizer steps of an RL step. Collective: the training grid."""
    metrics = MetricSet()
    before = run.version
    for _ in range(run.plan.batch.iterations):
        for batch in batches:
            metrics = metrics.merge(update_once(run, batch, run.version == before))
    return metrics


def policy_loss(run: RLJob, denominators: Denominators, first_update: bool) -> LossFunction:
    """The loss of one optimizer step, with the mismatch where it can be told.

    The trainer's log-probs under the weights that sampled are the old log-probs, unless those are
    the engine's own, or the present ones as long as no update has been made.
    """
    old_is_trainers = run.config.rl.old_logprob != "rollout"

    def loss(inputs: LossInputs) -> LossOutputs:
        outputs = clipped_policy_loss(inputs, run.clip, denominators)
        known = inputs.old_logprobs if old_is_trainers else None
        if known is None and first_update:
            known = inputs.logprobs.detach()
        if known is None:
            return outputs
        return replace(
            outputs, terms={**outputs.terms, **mismatch_terms(known, inputs.rollout_logprobs)}
        )

    return loss


def update_once(run: RLJob, batch: UpdateBatch, first_update: bool) -> MetricSet:
    """One optimizer step; a batch without a single trained token is skipped and counted (R37)."""
    silent: MetricSet = MetricSet({name: Mean(0.0, 0.0) for name in _LOSS_MEANS})
    silent |= {name: Max() for name in _LOSS_MAXIMA}
    if run.reference is not None:
        silent["loss/kl"] = Mean(0.0, 0.0)
    first = run.rank == 0
    if batch.denominators.tokens == 0:
        return silent.merge({"optimizer/skipped": Total(float(first))})
    found = run.policy.forward_backward(
        batch.micro_batches, policy_loss(run, batch.denominators, first_update)
    )
    stats = run.policy.step()
    run.version += 1
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
    lengths = [s.response.numel() for s in samples]
    values = {
        "reward/mean": sum(known) / max(1, len(known)),
        "reward/max": max(known, default=math.nan),
        "reward/min": min(known, default=math.nan),
        "reward/abstained": float(len(samples) - len(known)),
        "response/length_mean": sum(lengths) / len(lengths),
        "response/length_max": float(max(lengths)),
        "response/truncated_fraction": sum(not s.stopped for s in samples) / len(samples),
        "reward/degenerate_groups": _degenerate(samples, run.plan.batch.group_size),
    }
    for i, name in enumerate(run.reward_names):
        scores = [s.parts[i] for s in samples if not math.isnan(s.parts[i])]
        values[f"reward/{name}"] = sum(scores) / max(1, len(scores))
    return values


def _degenerate(samples: Sequence[Sample], group_size: int) -> float:
    """Share of groups whose rewards are all equal: they teach nothing."""
    groups = [samples[i : i + group_size] for i in range(0, len(samples), group_size)]
    return sum(len({s.reward for s in group}) == 1 for group in groups) / len(groups)


PROBE_TOKENS = 24


def probe(run: RLJob) -> float:
    """Compare log-probs of engine and trainer on one prompt per engine (R4).

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
        samples = exchange_rollouts(mine if run.leads_engine else [], (), engines)
    run.phases.to_train()
    with run.phase("probe"):
        batches = training.local_batches(run.job, run.policy, as_train_samples(run, samples))
        pairs = zip(run.policy.logprobs(batches), batches, strict=True)
        gaps = [(logp - b.batch.rollout_logprobs).abs() for logp, b in pairs if logp is not None]
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
