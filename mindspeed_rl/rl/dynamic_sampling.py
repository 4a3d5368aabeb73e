"""Dynamic sampling: prompts are drawn until enough groups teach something.

All ranks know all samples, so all decide alike without a message. Groups are lists of samples of
one prompt; what is accepted beyond the need of a step starts the next one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from mindspeed_rl.algorithms.advantages import teaches
from mindspeed_rl.metrics.metric_set import Max, Mean, MetricSet
from mindspeed_rl.samples.rollout_info import RolloutInfo

Group = Sequence[RolloutInfo]
Draw = Callable[[int, int, int], list[Group]]
"""(groups that are missing, prompts to sample, round) -> complete groups."""


@dataclass(frozen=True, slots=True)
class FilledStep:
    """The groups of a step, what was generated for them, and what to report.

    Attributes:
        groups: to train on; as many as asked for unless ``train-on-partial`` says otherwise.
        generated: all groups sampled in this step.
        carried: accepted groups for the next step.
        metrics: the same on all ranks.
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

    A group is accepted when its rewards are not all equal: else every advantage of it is 0.

    Args:
        num_groups: of a step.
        carried: accepted groups of earlier steps; they come first.
        draw: see :data:`Draw`.
        max_resample: further rounds after the first.
        exhausted: ``train-on-partial``, ``keep-zero-std`` or ``stop``.
        factor: prompts of a round over the groups that are missing.

    Raises:
        RuntimeError: exhausted, and the policy is ``stop``.
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


def take_complete(
    num_groups: int, carried: Sequence[Group], draw: Draw, factor: float
) -> tuple[list[Group], list[Group], list[Group]]:
    """The groups of a step of partial rollouts without a filter.

    Args:
        num_groups: of a step.
        carried: complete groups of earlier steps; they come first.
        draw: see :data:`Draw`.
        factor: prompts to work on over the groups that are missing.

    Returns:
        The groups to train on, those that this step completed, and those left for the next step.
    """
    missing = max(0, num_groups - len(carried))
    generated = draw(missing, math.ceil(missing * factor), 0) if missing else []
    groups = [*carried, *generated]
    return groups[:num_groups], generated, groups[num_groups:]


def numbered(groups: Sequence[Group]) -> list[RolloutInfo]:
    """The samples of all groups, numbered by their place in the step."""
    samples = [s for group in groups for s in group]
    return [s if s.sample_id == i else replace(s, sample_id=i) for i, s in enumerate(samples)]
