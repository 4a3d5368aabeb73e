"""Who generates which samples: dealt at the start of a rollout, moved while it goes on."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.data.lengths import LengthHistory, deal_samples
from mindspeed_rl.experience.samples import Sample
from mindspeed_rl.observability.metrics import Max, MetricSet, Total
from mindspeed_rl.orchestration.rl_partial import most_tokens
from mindspeed_rl.orchestration.rl_phases import rollout_dtype
from mindspeed_rl.rollout.capabilities import CAPABILITIES
from mindspeed_rl.rollout.engine import SamplingSettings
from mindspeed_rl.rollout.rebalance import Rebalancer, Rules
from mindspeed_rl.rollout.rebalance_plan import StepCost
from mindspeed_rl.rollout.step_loop import StepStats
from mindspeed_rl.types import Prompt

if TYPE_CHECKING:
    from mindspeed_rl.orchestration.rl_job import RLJob


def my_share(
    run: RLJob,
    prompts: Sequence[Prompt],
    history: LengthHistory | None = None,
    begun: Sequence[Sample | None] = (),
) -> list[int]:
    """The sample ids that this rank's engine begins with, ascending. Local.

    A response that goes on does so on the engine that has its tokens.

    Args:
        run: the run.
        prompts: of all samples; position is the sample id.
        history: of responses to these prompts; ``None``: they are not those of training.
        begun: what there is of each response; empty where none goes on.
    """
    engine, flags = run.plan.engine, run.config.balance
    known = history if flags.rollout_balance == "history" else None
    limit = run.config.rollout.rollout_max_response_length
    group = engine.group_of(run.rank)
    new = [i for i in range(len(prompts)) if not begun or begun[i] is None]
    dealt = deal_samples([prompts[i].index for i in new], engine.num_groups, known, limit)[group]
    kept = [i for i, sample in enumerate(begun) if sample is not None and sample.group == group]
    return sorted([*(new[i] for i in dealt), *kept])


def make_rebalancer(
    run: RLJob,
    prompts: Sequence[Prompt],
    settings: SamplingSettings,
    history: LengthHistory | None,
    begun: Sequence[Sample | None] = (),
) -> Rebalancer | None:
    """What moves requests during one rollout; ``None`` where nothing is to move. Local."""
    engine, flags = run.plan.engine, run.config.balance
    if flags.rollout_rebalance == "off" or engine.num_groups == 1:
        return None
    known = history if history is not None else LengthHistory()
    limit = settings.max_response_tokens

    def expected(sample_id: int, generated: int) -> int:
        length = known.expected(prompts[sample_id].index, generated, limit)
        return min(length, most_tokens(run, begun[sample_id])) if begun else length

    return Rebalancer(rules_of(run), engine.group_of(run.rank), run.leads_engine, expected)


def check_rebalance(config: RLRunConfig, platform: str) -> None:
    """Refuse to move what the installed engine cannot go on with. Local; vLLM is not imported.

    Raises:
        ValueError: naming the flag and what to use.
    """
    if config.balance.rollout_rebalance != "all":
        return
    if not CAPABILITIES[platform].streams:
        raise ValueError(
            f"--rollout-rebalance all: vLLM on {platform} cannot let the random stream of a "
            "request go on in another engine; use waiting"
        )


def rules_of(run: RLJob) -> Rules:
    """From flags and layouts alone, so equal on all ranks. Local."""
    flags, spec, layout = run.config.balance, run.plan.spec, run.plan.vllm
    item = rollout_dtype(run.config.rollout, run.config.train).itemsize
    weights = item * sum(map(math.prod, dict(layout.local_shapes(0)).values()))
    token_bytes = item * spec.num_layers * spec.cached_values(run.plan.engine.tp)
    sizes = run.config.engine.rollout_graph_sizes
    cost = StepCost(
        flags.rollout_ridge_tokens,
        weights / token_bytes,
        tuple(sorted(int(size) for size in sizes if size.isdigit())),
    )
    return Rules(
        interval=flags.rollout_rebalance_interval,
        groups_per_engine=run.plan.engine.dp,
        running=flags.rollout_rebalance == "all",
        min_gain=flags.rollout_rebalance_gain,
        cost=cost,
        capacity=run.engine.max_num_seqs,
        room=int(run.config.rollout.rollout_kv_cache_gb * 2**30 / token_bytes),
    )


def observe_lengths(run: RLJob, samples: Sequence[Sample]) -> None:
    """Add the finished responses of a step to the history; alike on all ranks. Local."""
    lengths: dict[int, list[int]] = defaultdict(list)
    for sample in samples:
        lengths[sample.prompt_index].append(sample.num_tokens)
    run.lengths.observe(lengths)


def balance_metrics(run: RLJob, stats: StepStats) -> MetricSet:
    """Steps of the slowest engine, and what moved. Local."""
    metrics = MetricSet({"rollout/steps_max": Max(float(stats.steps))})
    if run.config.balance.rollout_rebalance != "off":
        mine = float(run.leads_engine)
        metrics["rollout/moved_samples"] = Total(mine * stats.moved)
        metrics["rollout/moved_tokens"] = Total(mine * stats.moved_tokens)
        metrics["throughput/settle_s"] = Max(stats.settle_seconds)
    return metrics
