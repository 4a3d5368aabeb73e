"""Dynamic sampling: prompts are drawn until enough groups teach something.

All ranks know all samples, so all decide alike without a message. Groups are lists of samples of
one prompt; what is accepted beyond the need of a step starts the next one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mindspeed_rl.algorithms.advantages import teaches
from mindspeed_rl.observability.metrics import Max, Mean, MetricSet
from mindspeed_rl.rl.batches import Response, holders_of, store_responses
from mindspeed_rl.rl.build import RLJob
from mindspeed_rl.samples.rollout_info import Sample, SampleKey

Group = Sequence[Sample]
Draw = Callable[[int, int, int], list[Group]]
"""(groups that are missing, prompts to sample, round) -> complete groups."""


@dataclass(frozen=True, slots=True)
class Filled:
    """The groups of a step, what was drawn for them, and what to report.

    Attributes:
        groups: to train on; as many as asked for unless ``train-on-partial`` says otherwise.
        drawn: all groups sampled in this step.
        surplus: accepted groups for the next step.
        metrics: the same on all ranks.
    """

    groups: list[Group]
    drawn: list[Group]
    surplus: list[Group]
    metrics: MetricSet


def fill(
    num_groups: int,
    surplus: Sequence[Group],
    draw: Draw,
    *,
    max_resample: int,
    exhausted: str,
    factor: float,
) -> Filled:
    """Draw until ``num_groups`` groups are accepted or the rounds are used up.

    A group is accepted when its rewards are not all equal: else every advantage of it is 0.

    Args:
        num_groups: of a step.
        surplus: accepted groups of earlier steps; they come first.
        draw: see :data:`Draw`.
        max_resample: further rounds after the first.
        exhausted: ``train-on-partial``, ``keep-zero-std`` or ``stop``.
        factor: prompts of a round over the groups that are missing.

    Raises:
        RuntimeError: exhausted, and the policy is ``stop``.
    """
    accepted, rejected, drawn = list(surplus), [], []
    rounds = 0
    while len(accepted) < num_groups and rounds <= max_resample:
        missing = num_groups - len(accepted)
        groups = draw(missing, math.ceil(missing * factor), rounds)
        drawn += groups
        useful = _useful(groups)
        accepted += [g for g, u in zip(groups, useful, strict=True) if u]
        rejected += [g for g, u in zip(groups, useful, strict=True) if not u]
        rounds += 1
    missing = max(0, num_groups - len(accepted))
    if missing and exhausted == "stop":
        raise RuntimeError(
            f"--rl-resample-exhausted stop: {len(accepted)} of {num_groups} groups have rewards "
            f"that differ after {rounds} rounds of {len(drawn)} prompts; the data is too easy or "
            "too hard, or raise --rl-max-resample"
        )
    groups = accepted[:num_groups]
    if exhausted == "keep-zero-std":
        groups += rejected[:missing]
    left = accepted[num_groups:]
    metrics = _metrics(drawn, rounds, missing, len(left))
    return Filled(groups, drawn, left, metrics)


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


def fill_step(run: RLJob, draw: Draw) -> Filled:
    """:func:`fill` as the flags say; the surplus stays with the run."""
    flags = run.config.sampling
    filled = fill(
        run.plan.batch.prompts,
        run.surplus,
        draw,
        max_resample=flags.rl_max_resample,
        exhausted=flags.rl_resample_exhausted,
        factor=flags.rl_resample_factor,
    )
    run.surplus = filled.surplus
    return filled


def take_complete(run: RLJob, draw: Draw) -> tuple[list[Group], list[Group]]:
    """The groups of a step of partial rollouts, and those that it completed.

    What is complete beyond the need of the step starts the next one.
    """
    num_groups, factor = run.plan.batch.prompts, run.config.sampling.rl_resample_factor
    missing = max(0, num_groups - len(run.surplus))
    drawn = draw(missing, math.ceil(missing * factor), 0) if missing else []
    groups = [*run.surplus, *drawn]
    run.surplus = groups[num_groups:]
    return groups[:num_groups], drawn


def numbered(groups: Sequence[Group]) -> list[Sample]:
    """The samples of all groups, numbered by their place in the step."""
    samples = [s for group in groups for s in group]
    return [s if s.sample_id == i else replace(s, sample_id=i) for i, s in enumerate(samples)]


def surplus_state(
    groups: Sequence[Group], responses: Sequence[Response]
) -> list[list[dict[str, Any]]]:
    """Plain types, for a checkpoint; fp32 log-probs survive as they are.

    Args:
        groups: of samples.
        responses: of all of them, in order.
    """
    given = iter(responses)
    return [[_plain(s, next(given)) for s in group] for group in groups]


def _plain(sample: Sample, response: Response) -> dict[str, Any]:
    mask = response.loss_mask
    return {
        "sample_id": sample.sample_id,
        "prompt_index": sample.prompt_index,
        "response": response.token_ids.tolist(),
        "logprobs": response.logprobs.tolist(),
        "stopped": sample.stopped,
        "weights_version": sample.weights_version,
        "reward": sample.reward,
        "parts": list(sample.parts),
        "loss_mask": None if mask is None else mask.tolist(),
        "spans": [list(span) for span in sample.spans],
        "group": sample.group,
    }


def restored_surplus(
    state: Sequence[Sequence[Mapping[str, Any]]], step: int, num_groups: int, saved_groups: int = 0
) -> tuple[list[Group], list[Response]]:
    """The inverse of :func:`surplus_state`: groups of samples, and all responses in order.

    Args:
        state: of a checkpoint.
        step: after which it was saved.
        num_groups: of engine ranks.
        saved_groups: of the run that saved it. Where they are as many, each holds what it held,
            since who trains on a sample depends on it; else they take turns.
    """
    responses = [_response(fields) for group in state for fields in group]
    groups: list[Group] = []
    number = 0
    for group in state:
        samples = []
        for fields in group:
            response = responses[number]
            mask = response.loss_mask
            samples.append(
                Sample(
                    sample_id=fields["sample_id"],
                    prompt_index=fields["prompt_index"],
                    num_tokens=response.token_ids.numel(),
                    num_sampled=response.token_ids.numel() if mask is None else int(mask.sum()),
                    stopped=fields["stopped"],
                    weights_version=fields["weights_version"],
                    group=fields["group"] if saved_groups == num_groups else number % num_groups,
                    reward=fields["reward"],
                    parts=tuple(fields["parts"]),
                    key=SampleKey(step, number),
                    spans=tuple((version, tokens) for version, tokens in fields["spans"]),
                )
            )
            number += 1
        groups.append(samples)
    return groups, responses


def _response(fields: Mapping[str, Any]) -> Response:
    mask = fields["loss_mask"]
    return Response(
        torch.tensor(fields["response"], dtype=torch.int64),
        torch.tensor(fields["logprobs"], dtype=torch.float32),
        None if mask is None else torch.tensor(mask, dtype=torch.bool),
    )


def keep_surplus(
    run: RLJob, groups: Sequence[Group], responses: Sequence[Response], num_pending: int = 0
) -> None:
    """Take restored groups over, each rank the tokens that it is to hold. Local.

    The last ``num_pending`` have responses that go on.

    Raises:
        ValueError: there are some, but the run lets none go on, or replays experts that a
            checkpoint does not hold.
    """
    if groups and run.config.rl.rl_routing_replay == "rollout":
        raise ValueError(
            f"--load: the checkpoint carries {len(groups)} groups over, without the experts that "
            "--rl-routing-replay rollout replays; give --rl-routing-replay trainer or none"
        )
    if num_pending and not run.config.balance.partial_rollout_tokens:
        raise ValueError(
            f"--load: {num_pending} groups of the checkpoint have responses that go on; give "
            "--partial-rollout-tokens as in the run that saved it"
        )
    border = len(groups) - num_pending
    run.surplus, run.pending = list(groups[:border]), list(groups[border:])
    samples = [s for group in groups for s in group]
    holders = holders_of(run, samples)
    mine = [i for i, first in enumerate(holders.first) if 0 <= run.rank - first < holders.count]
    store_responses(run.cache, [responses[i] for i in mine], [samples[i] for i in mine])
