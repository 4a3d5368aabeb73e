"""Partial rollouts: a step ends when enough groups are complete, the others go on in the next.

One pass of generation lets every response grow by at most ``--partial-rollout-tokens``. How far a
response is, and which weights sampled how much of it, is in the sample table, so all ranks decide
alike. Its tokens stay in the cache of the engine that has them, which goes on with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mindspeed_rl.observability.metrics import Max, Mean, MetricSet
from mindspeed_rl.rollout.engine import GenerationRequest
from mindspeed_rl.samples.device_cache import LOGPROBS, TOKENS
from mindspeed_rl.samples.rollout_info import Sample
from mindspeed_rl.types import Prompt

if TYPE_CHECKING:
    from mindspeed_rl.rl.build import RLJob

Pass = Callable[[Sequence[Prompt], Sequence[Sample | None]], list[Sample]]
"""(prompts, what there is of each response) -> all of each after one more pass, in order."""


def most_tokens(run: RLJob, begun: Sample | None) -> int:
    """How long a response may be after the present pass; equal on all ranks. Local."""
    limit = run.config.rollout.rollout_max_response_length
    have = 0 if begun is None else begun.num_tokens
    return min(limit, have + run.config.balance.partial_rollout_tokens)


def continued(run: RLJob, request: GenerationRequest, begun: Sample | None) -> GenerationRequest:
    """A request with what the cache of this rank has of its response, for one pass. Local."""
    if not run.config.balance.partial_rollout_tokens:
        return request
    request = replace(request, max_tokens=most_tokens(run, begun))
    if begun is None:
        return request
    tokens, logprobs = (
        run.cache.read(column, begun.key, begun.weights_version).tolist()
        for column in (TOKENS, LOGPROBS)
    )
    return replace(request, begun=tuple(tokens), begun_logprobs=tuple(logprobs))


def draw_complete(
    run: RLJob, needed: int, in_flight: int, run_pass: Pass
) -> tuple[list[Sequence[Sample]], MetricSet]:
    """Run passes until ``needed`` groups are complete; the incomplete ones stay with the run.

    Args:
        run: the run; its pending groups go on first.
        needed: groups.
        in_flight: groups to work on: new prompts are drawn until there are so many.
        run_pass: one pass of generation.

    Returns:
        The complete groups, the older first, maybe more than needed; and what to report.
    """
    size, limit = run.plan.batch.group_size, run.config.rollout.rollout_max_response_length
    indices = [group[0].prompt_index for group in run.pending]
    groups: list[list[Sample | None]] = [list(group) for group in run.pending]
    new = run.sampler.next(max(0, in_flight - len(groups)))
    indices += new
    groups += [[None] * size for _ in new]
    carried, passes = len(run.pending), 0
    while True:
        open_places = [
            (g, m)
            for g, group in enumerate(groups)
            for m, sample in enumerate(group)
            if sample is None or sample.goes_on(limit)
        ]
        before = [groups[g][m] for g, m in open_places]
        prompts = [run.prompts[indices[g]] for g, _ in open_places]
        after = run_pass(prompts, before)
        passes += 1
        for (g, m), old, sample in zip(open_places, before, after, strict=True):
            groups[g][m] = sample.grown_from(old)
        whole = [[s for s in group if s is not None] for group in groups]
        is_open = [any(s.goes_on(limit) for s in group) for group in whole]
        if len(whole) - sum(is_open) >= needed or not any(is_open):
            break
    run.pending = [group for group, goes_on in zip(whole, is_open, strict=True) if goes_on]
    complete = [group for group, goes_on in zip(whole, is_open, strict=True) if not goes_on]
    return list(complete), _metrics(run, complete, carried, passes)


def _metrics(
    run: RLJob, complete: Sequence[Sequence[Sample]], carried: int, passes: int
) -> MetricSet:
    samples = [s for group in complete for s in group]
    stale = float(sum(s.num_stale(run.version) for s in samples))
    return MetricSet(
        {
            "partial/passes": Max(float(passes)),
            "partial/carried_groups": Max(float(carried)),
            "partial/pending_groups": Max(float(len(run.pending))),
            "partial/stale_tokens": Mean(stale, float(sum(s.num_tokens for s in samples))),
        }
    )
