"""What a checkpoint keeps of samples that are carried into the next step, with their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.samples.columns import LOSS_MASK, TOKEN_IDS, Column
from mindspeed_rl.samples.rollout_info import RolloutInfo, SampleKey
from mindspeed_rl.samples.store import ResponseTensors


def carryover_state(
    groups: Sequence[Sequence[RolloutInfo]], responses: Sequence[ResponseTensors]
) -> dict[str, Any]:
    """Return the groups as plain types, and their tokens as one tensor for each column. Local.

    Args:
        groups: Groups of samples.
        responses: Responses of all samples of the groups, in order.

    Returns:
        ``samples``, the groups; ``columns``, tensors [sum of tokens] or [sum of tokens, width] by
        name, in the order of the samples.
    """
    given = iter(responses)
    samples = [[_plain(s, next(given)) for s in group] for group in groups]
    names = responses[0] if samples and responses else {}
    return {
        "samples": samples,
        "columns": {name: torch.cat([r[name] for r in responses]) for name in names},
    }


def _plain(sample: RolloutInfo, response: ResponseTensors) -> dict[str, Any]:
    return {
        "sample_id": sample.sample_id,
        "prompt_index": sample.prompt_index,
        "num_tokens": response[TOKEN_IDS.name].size(0),
        "stopped": sample.stopped,
        "weights_version": sample.weights_version,
        "reward": sample.reward,
        "parts": list(sample.parts),
        "spans": [list(span) for span in sample.earlier_versions],
        "group": sample.group,
    }


def restored_carryover(
    state: Mapping[str, Any] | Sequence[Sequence[Mapping[str, Any]]],
    step: int,
    columns: Sequence[Column],
    num_groups: int,
    saved_groups: int = 0,
) -> tuple[list[Sequence[RolloutInfo]], list[ResponseTensors]]:
    """Invert :func:`carryover_state`: return the groups, and all responses in order. Local.

    Args:
        state: State in the checkpoint; a list is that of an older version.
        step: Step after which it was saved.
        columns: Columns that the run keeps of every token.
        num_groups: Number of groups of engine ranks.
        saved_groups: ``num_groups`` of the run that saved the state. Where both are equal, each
            rank group gets its own samples back, since who trains on a sample depends on it;
            otherwise the rank groups get samples in turn.

    Raises:
        UsageError: the checkpoint lacks a column that this run needs.
    """
    if not isinstance(state, Mapping):
        state = _of_older_version(state, columns)
    samples = [fields for group in state["samples"] for fields in group]
    responses = _responses(state["columns"], [f["num_tokens"] for f in samples], columns)
    groups: list[Sequence[RolloutInfo]] = []
    number = 0
    for fields_of_group in state["samples"]:
        group = []
        for fields in fields_of_group:
            mask = responses[number].get(LOSS_MASK.name)
            num_tokens = fields["num_tokens"]
            group.append(
                RolloutInfo(
                    sample_id=fields["sample_id"],
                    prompt_index=fields["prompt_index"],
                    num_tokens=num_tokens,
                    num_sampled=num_tokens if mask is None else int(mask.sum()),
                    stopped=fields["stopped"],
                    weights_version=fields["weights_version"],
                    group=fields["group"] if saved_groups == num_groups else number % num_groups,
                    reward=fields["reward"],
                    parts=tuple(fields["parts"]),
                    key=SampleKey(step, number),
                    earlier_versions=tuple(
                        (version, tokens) for version, tokens in fields["spans"]
                    ),
                )
            )
            number += 1
        groups.append(group)
    return groups, responses


def _responses(
    saved: Mapping[str, torch.Tensor], lengths: Sequence[int], columns: Sequence[Column]
) -> list[ResponseTensors]:
    """Cut the tensors of all samples into those of each.

    Raises:
        UsageError: A column is missing.
    """
    if not lengths:
        return []
    for column in columns:
        if column.name not in saved:
            raise UsageError(
                f"--load: the checkpoint carries responses over without their {column.name}, which "
                f"this run needs (filled by {column.filled_by}); resume with the flags of the run "
                "that saved it, or from a checkpoint without groups that are carried over"
            )
    cut = {c.name: torch.split(saved[c.name].to(c.dtype), list(lengths)) for c in columns}
    return [{name: parts[i] for name, parts in cut.items()} for i in range(len(lengths))]


def _of_older_version(
    groups: Sequence[Sequence[Mapping[str, Any]]], columns: Sequence[Column]
) -> dict[str, Any]:
    """Return the state of a checkpoint that has the tokens of each sample as lists of numbers."""
    samples = [fields for group in groups for fields in group]
    known = [c for c in columns if all(c.name in fields["columns"] for fields in samples)]
    return {
        "samples": [
            [{**fields, "num_tokens": len(fields["columns"][TOKEN_IDS.name])} for fields in group]
            for group in groups
        ],
        "columns": {
            c.name: torch.cat([torch.tensor(f["columns"][c.name], dtype=c.dtype) for f in samples])
            for c in known
            if samples
        },
    }
