"""Dynamic sampling: prompts are drawn until enough groups have rewards that differ.

All ranks know all samples, so all decide alike without a message. Groups are lists of samples of
one prompt; accepted groups beyond the need of a step are kept for the next one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mindspeed_rl.algorithms.advantages import teaches
from mindspeed_rl.metrics.metric_set import Max, Mean, MetricSet
from mindspeed_rl.samples.rollout_info import RolloutInfo

Group = Sequence[RolloutInfo]
Draw = Callable[[int, int, int], list[Group]]
"""(number of missing groups, number of prompts to sample, round) -> complete groups."""


@dataclass(frozen=True, slots=True)
class FilledStep:
    """The groups of a step, the samples generated for them, and their metrics.

    Attributes:
        groups: Groups to train on; fewer than asked for only under ``train-on-partial``.
        generated: All groups sampled in this step.
        carried: Accepted groups for the next step.
        metrics: Metrics of sampling, the same on all ranks.
    """

    groups: list[Group]
    generated: list[Group]
    carried: list[Group]
    metrics: MetricSet


def fill_step(
    num_groups: int,
    carried: Sequence[Group],
    draw: Draw,
    *,
    max_resample: int,
    exhausted: str,
    factor: float,
) -> FilledStep:
    """Draw until ``num_groups`` groups are accepted or the rounds are used up.

    A group is accepted when its rewards are not all equal; otherwise all its advantages are 0.

    Args:
        num_groups: Number of groups of a step.
        carried: Accepted groups of earlier steps; they come first.
        draw: See :data:`Draw`.
        max_resample: Number of further rounds after the first.
        exhausted: ``train-on-partial``, ``keep-zero-std`` or ``stop``.
        factor: Prompts that a round draws for each missing group.

    Raises:
        RuntimeError: the rounds are used up, and ``exhausted`` is ``stop``.
    """
    accepted, rejected, generated = list(carried), [], []
    rounds = 0
    while len(accepted) < num_groups and rounds <= max_resample:
        missing = num_groups - len(accepted)
        groups = draw(missing, math.ceil(missing * factor), rounds)
        generated += groups
        useful = _useful(groups)
        accepted += [g for g, u in zip(groups, useful, strict=True) if u]
        rejected += [g for g, u in zip(groups, useful, strict=True) if not u]
        rounds += 1
    missing = max(0, num_groups - len(accepted))
    if missing and exhausted == "stop":
        raise RuntimeError(
            f"--rl-resample-exhausted stop: {len(accepted)} of {num_groups} groups have rewards "
            f"that differ after {rounds} rounds of {len(generated)} prompts; the data is too easy "
            "or too hard, or raise --rl-max-resample"
        )
    groups = accepted[:num_groups]
    if exhausted == "keep-zero-std":
        groups += rejected[:missing]
    left = accepted[num_groups:]
    metrics = _metrics(generated, rounds, missing, len(left))
    return FilledStep(groups, generated, left, metrics)


def _useful(groups: Sequence[Group]) -> list[bool]:
    if not groups:
        return []
    return [bool(u) for u in teaches(torch.tensor([[s.reward for s in g] for g in groups]))]


def _metrics(drawn: Sequence[Group], rounds: int, missing: int, num_left: int) -> MetricSet:
    def share(reward: float) -> Mean:
        return Mean.of(float(all(s.reward == reward for s in g)) for g in drawn)

    return MetricSet(
        {
            "sampling/accepted": Mean.of(float(u) for u in _useful(drawn)),
            "sampling/all_0": share(0.0),
            "sampling/all_1": share(1.0),
            "sampling/rounds": Max(float(rounds)),
            "sampling/missing_groups": Max(float(missing)),
            "sampling/surplus_groups": Max(float(num_left)),
        }
    )
