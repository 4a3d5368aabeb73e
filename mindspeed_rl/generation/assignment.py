"""Decides which engine generates which samples, before a pass and while it runs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.core.types import Prompt
from mindspeed_rl.metrics.metric_set import Max, MetricSet, Total
from mindspeed_rl.planning.run_plan import RLPlan
from mindspeed_rl.rollout.draft_model import cached_values, draft_model_of
from mindspeed_rl.rollout.rebalance import ExpectedLength, Rebalancer, RebalanceRules, Visits
from mindspeed_rl.rollout.rebalance_plan import StepCost
from mindspeed_rl.rollout.requests import SamplingSettings
from mindspeed_rl.rollout.stats import StepStats
from mindspeed_rl.samples.lengths import LengthHistory, assign_to_engines, longest_first
from mindspeed_rl.samples.rollout_info import RolloutInfo


@dataclass(frozen=True, slots=True)
class EngineAssignment:
    """Assigns samples to engines; equal on all ranks except for ``rank``.

    Attributes:
        engine: Layout of the engines.
        rank: Global rank.
        limit: Most tokens of a response.
        partial_tokens: Most tokens by which one pass extends a response; 0: to its end.
        by_length: Whether to assign samples, and start the longest first, by the lengths of earlier
            responses.
        rules: When requests move between engines while they generate; ``None``: never.
    """

    engine: EngineLayout
    rank: int
    limit: int
    partial_tokens: int = 0
    by_length: bool = True
    rules: RebalanceRules | None = None

    @property
    def leads_engine(self) -> bool:
        """Whether this rank is the first of its tensor-parallel ranks, and acts for all of them."""
        return self.engine.tp_rank(self.rank) == 0

    def max_tokens(self, prefix: RolloutInfo | None) -> int:
        """Return the most tokens of a response after the present partial pass. Local."""
        have = 0 if prefix is None else prefix.num_tokens
        return min(self.limit, have + self.partial_tokens)

    def own_samples(
        self,
        prompts: Sequence[Prompt],
        history: LengthHistory | None = None,
        prefixes: Sequence[RolloutInfo | None] = (),
    ) -> list[int]:
        """Return the ids of the samples that this rank's engine starts with, ascending. Local.

        A response with a prefix continues on the engine that has its tokens.

        Args:
            prompts: Prompts of all samples; the position is the sample id.
            history: Lengths of earlier responses; ``None`` for prompts not trained on.
            prefixes: Beginning of each response; empty where no response continues.
        """
        group, num_groups = self.engine.group_of(self.rank), self.engine.num_groups
        known = history if self.by_length else None
        new = [i for i in range(len(prompts)) if not prefixes or prefixes[i] is None]
        chosen = assign_to_engines([prompts[i].index for i in new], num_groups, known, self.limit)[
            group
        ]
        kept = [i for i, s in enumerate(prefixes) if s is not None and s.group == group]
        return sorted([*(new[i] for i in chosen), *kept])

    def expected_lengths(
        self,
        prompts: Sequence[Prompt],
        settings: SamplingSettings,
        history: LengthHistory | None,
        prefixes: Sequence[RolloutInfo | None] = (),
        limits: Sequence[int] = (),
    ) -> ExpectedLength:
        """Return the estimate of lengths at the end of one pass, equal on all ranks. Local.

        Args:
            prompts: Prompts of all samples; the position is the sample id.
            settings: Sampling settings.
            history: Lengths of earlier responses; ``None``: nothing is known.
            prefixes: Beginning of each response; empty where no response continues.
            limits: Most tokens of each response; empty: those of the settings.
        """
        known = history if history is not None else LengthHistory()

        def expected(sample_id: int, generated: int) -> int:
            most = limits[sample_id] if limits else settings.max_response_tokens
            length = known.expected(prompts[sample_id].index, generated, most)
            return min(length, self.max_tokens(prefixes[sample_id])) if prefixes else length

        return expected

    def start_order(
        self,
        own: Sequence[int],
        expected: ExpectedLength,
        prefixes: Sequence[RolloutInfo | None] = (),
    ) -> list[int]:
        """Return samples in the order in which this rank's engine starts them. Local.

        Those that have most left to generate come first, so that an engine with more samples than
        places does not end with one long response; equals, such as siblings, stay neighbours. The
        noise of a token follows from seed and position, so the order changes no token.

        Args:
            own: Samples of this rank's engine.
            expected: Estimate of their lengths.
            prefixes: Beginning of each response; empty where no response continues.
        """
        if not self.by_length:
            return list(own)

        def left(sample_id: int) -> int:
            prefix = prefixes[sample_id] if prefixes else None
            have = 0 if prefix is None else prefix.num_tokens
            return expected(sample_id, have) - have

        return longest_first(own, left)

    def rebalancer(
        self, expected: ExpectedLength, visits: Visits | None = None
    ) -> Rebalancer | None:
        """Return what moves requests during one pass; ``None`` where nothing is to move. Local.

        Args:
            expected: Estimate of the lengths of all samples.
            visits: Conversations of this rank; ``None`` where it has none.
        """
        if self.rules is None:
            return None
        group = self.engine.group_of(self.rank)
        return Rebalancer(self.rules, group, self.leads_engine, expected, visits)

    def metrics(self, stats: StepStats) -> MetricSet:
        """Return the slowest engine's steps, and the numbers of preemptions and moves. Local."""
        mine = float(self.leads_engine)
        metrics = MetricSet({"rollout/steps_max": Max(float(stats.steps))})
        metrics["rollout/preemptions"] = Total(mine * stats.preemptions)
        if self.rules is not None:
            metrics["rollout/moved_samples"] = Total(mine * stats.moved)
            metrics["rollout/moved_tokens"] = Total(mine * stats.moved_tokens)
            metrics["throughput/settle_s"] = Max(stats.rebalance_seconds)
        if self.partial_tokens:
            metrics["rollout/resumed_samples"] = Total(mine * stats.resumed)
            metrics["rollout/kept_cached_tokens"] = Total(mine * stats.kept_cached_tokens)
        return metrics


def rebalance_rules(
    config: RLRunConfig, plan: RLPlan, max_num_seqs: int, item_bytes: int
) -> RebalanceRules | None:
    """Return when requests move, equal on all ranks as it follows from flags and layouts. Local.

    Args:
        config: Flags of the run.
        plan: Layouts of trainer and engine.
        max_num_seqs: Number of sequences that an engine runs at once.
        item_bytes: Bytes of an element of the engine's weights and cache.
    """
    flags, spec = config.balance, plan.spec
    if flags.rollout_rebalance == "off" or plan.engine.num_groups == 1:
        return None
    weights = item_bytes * sum(map(math.prod, dict(plan.rollout_layout.local_shapes(0)).values()))
    draft = draft_model_of(config.engine_options)
    token_bytes = item_bytes * cached_values(spec, draft, plan.engine.tp)
    cost = StepCost(
        flags.rollout_ridge_tokens,
        weights / token_bytes,
        tuple(sorted(int(size) for size in config.engine.rollout_graph_sizes if size.isdigit())),
    )
    return RebalanceRules(
        interval=flags.rollout_rebalance_interval,
        groups_per_engine=plan.engine.dp,
        running=flags.rollout_rebalance == "all",
        min_gain=flags.rollout_rebalance_gain,
        cost=cost,
        capacity=max_num_seqs,
        room=int(config.rollout.rollout_kv_cache_gb * 2**30 / token_bytes),
    )


def observe_lengths(history: LengthHistory, samples: Sequence[RolloutInfo]) -> None:
    """Add the finished responses of a step to the history, equal on all ranks. Local."""
    lengths: dict[int, list[int]] = defaultdict(list)
    for sample in samples:
        lengths[sample.prompt_index].append(sample.num_tokens)
    history.observe(lengths)
