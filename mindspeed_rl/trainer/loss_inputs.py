"""Builds the inputs of a loss from a micro-batch and the model's outputs.

Shapes: N trained tokens of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mindspeed_rl.algorithms.types import LossInputs, Sequences, ValueInputs
from mindspeed_rl.samples.packing import MicroBatch

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Sums a tensor over the context-parallel ranks."""


def policy_inputs(
    micro: MicroBatch, logprobs: torch.Tensor, entropy: torch.Tensor, reduce: Reduce
) -> LossInputs:
    """Build the inputs of a policy loss. Collective if the loss sums over sequences, see below.

    Args:
        micro: The micro-batch. Without rollout the engine's log-probs and the advantages are 0.
        logprobs: [N] log-probs of the current policy, with gradient.
        entropy: [N] entropies of the current policy, with gradient.
        reduce: Sums a tensor over the context-parallel ranks.
    """
    columns, none = micro.columns, torch.zeros_like(logprobs)
    return LossInputs(
        logprobs=logprobs,
        entropy=entropy,
        old_logprobs=columns.get("old_logprobs"),
        rollout_logprobs=columns.get("rollout_logprobs", none),
        ref_logprobs=columns.get("ref_logprobs"),
        advantages=columns.get("advantages", none),
        sequences=_sequences(micro, reduce),
        covariance_mask=columns.get("covariance_mask"),
        on_policy_mask=columns.get("on_policy_mask"),
    )


def value_inputs(micro: MicroBatch, values: torch.Tensor, reduce: Reduce) -> ValueInputs:
    """Build the inputs of a value loss.

    Args:
        micro: The micro-batch, with the columns ``old_values`` and ``returns``.
        values: [N] values of the current critic, with gradient.
        reduce: Sums a tensor over the context-parallel ranks.
    """
    return ValueInputs(
        values, micro.column("old_values"), micro.column("returns"), _sequences(micro, reduce)
    )


def _sequences(micro: MicroBatch, reduce: Reduce) -> Sequences:
    device = micro.sequence_of.device
    num_trained = torch.tensor(micro.num_trained, dtype=torch.float32, device=device)
    return Sequences(micro.sequence_of, num_trained, reduce)
