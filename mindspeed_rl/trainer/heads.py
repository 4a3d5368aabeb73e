"""Heads turn the last hidden states into log-probs and entropies, or into values.

Shapes: T packed tokens of a micro-batch on this context-parallel rank, N trained tokens in it, h
hidden size. A head works on the rows that predict the trained tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from mindspeed_rl.algorithms.types import LossInputs, Sequences, SumOverRanks, ValueInputs
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.samples.packing import MicroBatch
from mindspeed_rl.trainer.logprobs import selected_logprobs
from mindspeed_rl.trainer.weight_gradient import WeightGradient

Outputs = tuple[torch.Tensor, ...]
Head = Callable[[MicroBatch, torch.Tensor], Outputs]
"""Turns hidden states [T, 1, h] (this rank's rows if sequence-parallel) into [N] each."""


class LogProbHead:
    """Computes log p and entropy of the trained tokens, each [N] fp32. Collective: the TP group.

    Args:
        module: Last chunk of the model.
        spec: Architecture of the model.
        temperature: Divisor of the logits.
        chunk: Number of positions whose logits exist at a time; 0 chooses by memory.
        overlaps: Whether gradients are reduced during the backward pass.
    """

    def __init__(
        self, module: Any, spec: ModelSpec, temperature: float, chunk: int, overlaps: bool
    ) -> None:
        self._module = module
        self.spec = spec
        self.temperature = temperature
        self.chunk = chunk
        fused = module.config.gradient_accumulation_fusion
        self.into = WeightGradient(fused=fused, overlaps=overlaps)

    def __call__(self, micro: MicroBatch, hidden: torch.Tensor) -> Outputs:
        return self.of_rows(micro, self.rows(micro, hidden))

    def rows(self, micro: MicroBatch, hidden: torch.Tensor) -> torch.Tensor:
        """Return the rows [N, h] that predict the trained tokens. Collective: the TP group."""
        rows: torch.Tensor = hidden[0]
        if self._module.config.sequence_parallel:
            rows = gather_from_sequence_parallel_region(rows)
        else:
            rows = copy_to_tensor_model_parallel_region(rows)
        return rows.index_select(0, micro.trained)

    def of_rows(self, micro: MicroBatch, rows: torch.Tensor) -> Outputs:
        """Return the outputs of the rows [N, h] of :meth:`rows`. Collective: the TP group."""
        group = parallel_state.get_tensor_model_parallel_group()
        return selected_logprobs(
            rows,
            self.weight(),
            micro.targets.index_select(0, micro.trained).long(),
            temperature=self.temperature,
            vocab_size=self.spec.vocab_size,
            tp_rank=group.rank(),
            group=group if group.size() > 1 else None,
            chunk=self.chunk,
            into=self.into,
        )

    def weight(self) -> torch.Tensor:
        """Return this rank's rows of the output projection, or of the embedding tied to it."""
        if self._module.share_embeddings_and_output_weights:
            return self._module.shared_embedding_or_output_weight()  # type: ignore[no-any-return]
        return self._module.output_layer.weight  # type: ignore[no-any-return]


class ValueOutputHead:
    """Computes the value before each trained token, [N] fp32. Collective: the TP group.

    Every tensor-parallel rank computes all values with its copy of the head, so the gradient of a
    row is whole on each of them: it is cut to the rank's rows, not summed.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, micro: MicroBatch, hidden: torch.Tensor) -> Outputs:
        rows = hidden[0]
        if self._module.config.sequence_parallel:
            rows = gather_from_sequence_parallel_region(rows, tensor_parallel_output_grad=False)
        weight = self._module.output_layer.weight
        rows = rows.index_select(0, micro.trained)
        return (F.linear(rows.float(), weight.float())[:, 0],)


def policy_inputs(micro: MicroBatch, outputs: Outputs, reduce: SumOverRanks) -> LossInputs:
    """Build the inputs of a policy loss. Collective if the loss sums over sequences, see below.

    Args:
        micro: The micro-batch. Without rollout the engine's log-probs and the advantages are 0.
        outputs: Log-probs and entropies of the current policy, and the KL to its teacher where
            the loss has it; with gradient.
        reduce: Sums a tensor over the context-parallel ranks.
    """
    logprobs, entropy, *teacher_kl = outputs
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
        teacher_logprobs=columns.get("teacher_logprobs"),
        teacher_kl=teacher_kl[0] if teacher_kl else None,
    )


def value_inputs(micro: MicroBatch, outputs: Outputs, reduce: SumOverRanks) -> ValueInputs:
    """Build the inputs of a value loss.

    Args:
        micro: The micro-batch, with the columns ``old_values`` and ``returns``.
        outputs: Values of the current critic, with gradient.
        reduce: Sums a tensor over the context-parallel ranks.
    """
    (values,) = outputs
    return ValueInputs(
        values, micro.column("old_values"), micro.column("returns"), _sequences(micro, reduce)
    )


def _sequences(micro: MicroBatch, reduce: SumOverRanks) -> Sequences:
    return Sequences(micro.sequence_of.long(), micro.trained_counts, reduce)


def make_head(module: Any, spec: ModelSpec, temperature: float, chunk: int, overlaps: bool) -> Head:
    """Build the head that the spec names. Local."""
    if spec.value_head:
        return ValueOutputHead(module)
    return LogProbHead(module, spec, temperature, chunk, overlaps)
