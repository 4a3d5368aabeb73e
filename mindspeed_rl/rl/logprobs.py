"""Computes old and reference log-probs, and values, of every trained token of a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from mindspeed_rl.core.memory import MemoryOwner
from mindspeed_rl.distillation.teachers import teachers_of_samples, with_teachers
from mindspeed_rl.metrics.metric_set import Max, Mean, MetricSet
from mindspeed_rl.planning.run_plan import is_first_old_pass_free
from mindspeed_rl.rl.batches import StepBatches, sample_of_token
from mindspeed_rl.rl.components import Components, RunState
from mindspeed_rl.rl.single_rows import single_row_logprobs
from mindspeed_rl.samples.columns import EARLY_COLUMNS
from mindspeed_rl.samples.rollout_info import RolloutInfo
from mindspeed_rl.samples.store import SampleStore

# Shares of the samples whose log-probs of a pass came from the tail of the rollout.
_IN_TAIL = {
    "old": "throughput/old_logprobs_in_tail",
    "reference": "throughput/reference_in_tail",
}


def compute_logprobs(
    run: Components, state: RunState, batches: StepBatches, samples: Sequence[RolloutInfo]
) -> StepBatches:
    """Add log-probs of old policy, reference and teachers, and values. Collective: training grid.

    For the first optimizer step of a batch, on-policy old log-probs need no pass of their own: the
    update pass computes them, so their column is absent, unless something needs them before it.
    ``forward/*`` counts the passes without gradient, in optimizer batches.
    """
    config = run.config
    on_policy = config.rl.old_logprob == "on-policy"
    if on_policy:
        check_on_policy(samples, state.version)
    old, num_old = _old_logprobs(run, batches)
    batches = batches.with_column("old_logprobs", old)
    reference, num_reference = run.models.reference, 0
    if reference is not None:
        num_reference = len(batches.updates)
        with run.scheduler.onloaded(MemoryOwner.REFERENCE):
            if config.rl.reference_pass == "packed":
                values = batches.by_update(reference.logprobs)
            else:
                values = single_row_logprobs(run.samples, "reference", reference, batches)
        batches = batches.with_column("ref_logprobs", values)
    if teachers := run.models.teachers:
        flags = config.distillation
        of_sample = teachers_of_samples(samples, run.data.train, [*teachers], flags.teacher_key)
        with run.scheduler.onloaded(MemoryOwner.TEACHERS):
            batches = batches.changed(partial(with_teachers, teachers, of_sample, flags.full))
    early = Mean.of(float(s.has_early) for s in samples)
    in_tail = [name for name, column in EARLY_COLUMNS.items() if column in run.samples.columns]
    batches = batches.with_metrics(MetricSet({_IN_TAIL[name]: early for name in in_tail}))
    if config.sampling.rl_resample_factor > 1 or config.balance.partial_rollout_tokens:
        batches = with_on_policy_mask(batches, run.samples, samples, state.version)
    counts = {"forward/old": Max(float(num_old)), "forward/reference": Max(float(num_reference))}
    if teachers:
        counts["forward/teachers"] = Max(float(len(batches.updates) * len(teachers)))
    batches = batches.with_metrics(MetricSet(counts))
    if run.models.critic is None:
        return batches
    with run.scheduler.onloaded(MemoryOwner.CRITIC):
        return batches.with_column("old_values", batches.by_update(run.models.critic.values))


def _old_logprobs(run: Components, batches: StepBatches) -> tuple[list[torch.Tensor | None], int]:
    """Return the old log-probs of each micro-batch, or ``None``, and the number of passes.

    They are ``None`` off the last stage, and where the first update computes them itself.
    """
    config, policy = run.config, run.models.policy
    if config.rl.old_logprob == "rollout":
        return [m.columns.get("rollout_logprobs") for m in batches.micro_batches], 0
    if config.rl.old_logprob_pass != "packed":
        found = single_row_logprobs(run.samples, "old", policy, batches)
        return found, len(batches.updates)
    first_is_free = is_first_old_pass_free(config, run.plan.batch.iterations)
    found = []
    num_passes = 0
    for number, update in enumerate(batches.updates):
        if first_is_free and number == 0:
            found += [None] * len(update.micro_batches)
        else:
            found += policy.logprobs(update.micro_batches)
            num_passes += 1
    return found, num_passes


def check_on_policy(samples: Sequence[RolloutInfo], version: int) -> None:
    """Check that the present weights sampled every sample.

    Raises:
        RuntimeError: samples of other versions, whose ratio would silently be taken as 1.
    """
    stale = [s.sample_id for s in samples if s.num_stale(version)]
    if stale:
        raise RuntimeError(
            f"--old-logprob on-policy: samples {stale[:8]} were sampled by other weights than "
            f"version {version}; use --old-logprob recompute or rollout"
        )


def with_on_policy_mask(
    batches: StepBatches, store: SampleStore, samples: Sequence[RolloutInfo], version: int
) -> StepBatches:
    """Mark the tokens that the weights of ``version`` sampled. Local."""
    position = {s.sample_id: i for i, s in enumerate(samples)}
    # The last position of each sequence whose next token was sampled by other weights.
    last = [store.num_prompt_tokens(s) - 2 + s.num_stale(version) for s in samples]
    last_stale = torch.tensor(last, device=store.cache.device)
    masks = [
        m.positions[m.trained] > last_stale[sample_of_token(m, position)]
        for m in batches.micro_batches
    ]
    return batches.with_column("on_policy_mask", masks)
