"""Metrics of the rewards and lengths of a step, from the sample table that every rank has."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from mindspeed_rl.metrics.names import RESPONSE_LENGTH, REWARD
from mindspeed_rl.samples.rollout_info import RolloutInfo


def sample_metrics(
    samples: Sequence[RolloutInfo], reward_names: Sequence[str], group_size: int
) -> dict[str, float]:
    """Return the metrics of rewards and lengths of a step, equal on every rank.

    What is known of no sample, such as rewards that all abstained, is NaN. Lengths count the tokens
    that the model sampled, not those of an environment or an agent.
    """
    known = [s.reward for s in samples if not math.isnan(s.reward)]
    lengths = [s.num_sampled for s in samples]
    values = {
        REWARD: sum(known) / len(known) if known else math.nan,
        "reward/std": spread(known),
        **_mean_spread(samples, group_size),
        "reward/max": max(known, default=math.nan),
        "reward/min": min(known, default=math.nan),
        "reward/abstained": float(len(samples) - len(known)),
        **quantiles("reward/", known),
        **quantiles("response/length_", lengths),
        "response/length_min": float(min(lengths, default=0)),
        RESPONSE_LENGTH: sum(lengths) / max(1, len(lengths)),
        "response/length_max": float(max(lengths, default=0)),
        "response/truncated_fraction": sum(not s.stopped for s in samples) / max(1, len(samples)),
        "reward/degenerate_groups": _degenerate(samples, group_size),
    }
    for i, name in enumerate(reward_names):
        scores = [s.parts[i] for s in samples if not math.isnan(s.parts[i])]
        values[f"reward/{name}"] = sum(scores) / len(scores) if scores else math.nan
    return values


def quantiles(prefix: str, values: Sequence[float]) -> dict[str, float]:
    """Return 10th, 50th and 90th percentile: the least value that this part of values reaches."""
    ordered = sorted(values)
    places = {q: max(0, math.ceil(len(ordered) * q / 100) - 1) for q in (10, 50, 90)}
    return {f"{prefix}p{q}": float(ordered[i]) if ordered else math.nan for q, i in places.items()}


def spread(values: Sequence[float]) -> float:
    """Return the standard deviation of values, divided by their number; NaN without values."""
    return statistics.pstdev(values) if values else math.nan


def _mean_spread(samples: Sequence[RolloutInfo], group_size: int) -> dict[str, float]:
    """Return the mean over groups of the spread of a group's rewards; nothing if none has two."""
    groups = [samples[i : i + group_size] for i in range(0, len(samples), group_size)]
    known = [[s.reward for s in group if not math.isnan(s.reward)] for group in groups]
    found = [spread(rewards) for rewards in known if len(rewards) > 1]
    return {"reward/group_std": sum(found) / len(found)} if found else {}


def _degenerate(samples: Sequence[RolloutInfo], group_size: int) -> float:
    """Return the part of the groups whose rewards are all equal, so that they teach nothing."""
    groups = [samples[i : i + group_size] for i in range(0, len(samples), group_size)]
    return sum(len({s.reward for s in group}) == 1 for group in groups) / max(1, len(groups))
