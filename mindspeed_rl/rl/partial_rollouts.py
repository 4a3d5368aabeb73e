"""Partial rollouts: a step ends when enough groups are complete; the next continues the others.

One pass of generation lets every response grow by at most ``--partial-rollout-tokens``. The sample
table has the length of each response and the weights that sampled each part, so all ranks decide
alike. The tokens stay in the cache of the engine that generated them, which continues the response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mindspeed_rl.core.types import Prompt
from mindspeed_rl.metrics.metric_set import Max, Mean, MetricSet
from mindspeed_rl.samples.rollout_info import RolloutInfo

Pass = Callable[[Sequence[Prompt], Sequence[RolloutInfo | None]], list[RolloutInfo]]
"""(prompts, beginnings of the responses) -> each response after one more pass, in order."""


@dataclass(frozen=True, slots=True)
class GrownGroups:
    """The groups that the passes of a step returned.

    Attributes:
        complete: Complete groups, the oldest first, possibly more than needed.
        partial: Groups with responses that the next step continues.
        num_continued: Number of groups that come from earlier steps.
        num_passes: Number of passes of generation.
    """

    complete: list[Sequence[RolloutInfo]]
    partial: list[Sequence[RolloutInfo]]
    num_continued: int
    num_passes: int

    def metrics(self, version: int) -> MetricSet:
        """Return the metrics of the passes; ``version`` is that of the present weights."""
        samples = [s for group in self.complete for s in group]
        stale = float(sum(s.num_stale(version) for s in samples))
        return MetricSet(
            {
                "partial/passes": Max(float(self.num_passes)),
                "partial/carried_groups": Max(float(self.num_continued)),
                "partial/pending_groups": Max(float(len(self.partial))),
                "partial/stale_tokens": Mean(stale, float(sum(s.num_tokens for s in samples))),
            }
        )


def complete_groups(
    partial: Sequence[Sequence[RolloutInfo]],
    needed: int,
    in_flight: int,
    *,
    group_size: int,
    limit: int,
    next_prompts: Callable[[int], Sequence[int]],
    prompts: Sequence[Prompt],
    run_pass: Pass,
) -> GrownGroups:
    """Run passes until ``needed`` groups are complete.

    Args:
        partial: Groups of earlier steps; they continue first.
        needed: Number of complete groups to reach.
        in_flight: Number of groups to work on; new prompts are drawn until there are so many.
        group_size: Number of samples of a prompt.
        limit: Most tokens of a response.
        next_prompts: Deals out indices of new prompts.
        prompts: The data set.
        run_pass: Runs one pass of generation.
    """
    indices = [group[0].prompt_index for group in partial]
    groups: list[list[RolloutInfo | None]] = [list(group) for group in partial]
    new = next_prompts(max(0, in_flight - len(groups)))
    indices += new
    groups += [[None] * group_size for _ in new]
    passes = 0
    while True:
        places = [
            (g, m)
            for g, group in enumerate(groups)
            for m, sample in enumerate(group)
            if sample is None or sample.is_incomplete(limit)
        ]
        before = [groups[g][m] for g, m in places]
        after = run_pass([prompts[indices[g]] for g, _ in places], before)
        passes += 1
        for (g, m), old, sample in zip(places, before, after, strict=True):
            groups[g][m] = sample.grown_from(old)
        complete, incomplete = list[Sequence[RolloutInfo]](), list[Sequence[RolloutInfo]]()
        for group in groups:
            known = [s for s in group if s is not None]
            is_incomplete = any(s.is_incomplete(limit) for s in known)
            (incomplete if is_incomplete else complete).append(known)
        if len(complete) >= needed or not incomplete:
            return GrownGroups(complete, incomplete, len(partial), passes)
