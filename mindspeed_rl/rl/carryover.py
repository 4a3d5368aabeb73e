"""Writes the groups that one step leaves for the next to a checkpoint, and reads them back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.rl.dynamic_sampling import Group
from mindspeed_rl.samples.columns import LOSS_MASK, TOKEN_IDS, Column
from mindspeed_rl.samples.rollout_info import RolloutInfo, SampleKey
from mindspeed_rl.samples.store import ResponseTensors


def carryover_state(
    groups: Sequence[Group], responses: Sequence[ResponseTensors]
) -> list[list[dict[str, Any]]]:
    """Return the groups as plain types for a checkpoint; fp32 log-probs keep their exact values.

    Args:
        groups: Groups of samples.
        responses: Responses of all samples of the groups, in order.
    """
    given = iter(responses)
    return [[_plain(s, next(given)) for s in group] for group in groups]


def _plain(sample: RolloutInfo, response: ResponseTensors) -> dict[str, Any]:
    return {
        "sample_id": sample.sample_id,
        "prompt_index": sample.prompt_index,
        "columns": {name: values.tolist() for name, values in response.items()},
        "stopped": sample.stopped,
        "weights_version": sample.weights_version,
        "reward": sample.reward,
        "parts": list(sample.parts),
        "spans": [list(span) for span in sample.spans],
        "group": sample.group,
    }


def restored_carryover(
    state: Sequence[Sequence[Mapping[str, Any]]],
    step: int,
    columns: Sequence[Column],
    num_groups: int,
    saved_groups: int = 0,
) -> tuple[list[Group], list[ResponseTensors]]:
    """Invert :func:`carryover_state`: return the groups, and all responses in order.

    Args:
        state: State in the checkpoint.
        step: Step after which it was saved.
        columns: Columns that the run keeps of every token.
        num_groups: Number of groups of engine ranks.
        saved_groups: ``num_groups`` of the run that saved the state. Where both are equal, each
            rank group gets its own samples back, since who trains on a sample depends on it;
            otherwise the rank groups get samples in turn.

    Raises:
        UsageError: the checkpoint lacks a column that this run needs.
    """
    groups: list[Group] = []
    responses: list[ResponseTensors] = []
    for fields_of_group in state:
        samples = []
        for fields in fields_of_group:
            number = len(responses)
            response = _response(fields["columns"], columns)
            mask = response.get(LOSS_MASK.name)
            num_tokens = response[TOKEN_IDS.name].size(0)
            samples.append(
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
                    spans=tuple((version, tokens) for version, tokens in fields["spans"]),
                )
            )
            responses.append(response)
        groups.append(samples)
    return groups, responses


def _response(values: Mapping[str, Any], columns: Sequence[Column]) -> ResponseTensors:
    for column in columns:
        if column.name not in values:
            raise UsageError(
                f"--load: the checkpoint carries responses over without their {column.name}, which "
                f"this run needs (filled by {column.filled_by}); resume with the flags of the run "
                "that saved it, or from a checkpoint without groups that are carried over"
            )
    return {c.name: torch.tensor(values[c.name], dtype=c.dtype) for c in columns}
