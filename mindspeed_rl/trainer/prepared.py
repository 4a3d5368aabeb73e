"""A micro-batch as every pass over it sees it.

Shapes: N trained tokens of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from mindspeed_rl.algorithms.types import LossInputs, Sequences, ValueInputs
from mindspeed_rl.samples.packing import MicroBatch
from mindspeed_rl.trainer.packed_attention import PackedRow
from mindspeed_rl.trainer.routing_replay import Routes


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A micro-batch on the device with its attention borders; reused by every pass over it.

    ``old_logprobs``, ``ref_logprobs``, ``old_values`` and ``returns`` are [N] fp32, ``selected``
    and ``fresh`` [N] bool, each on the last pipeline stage once computed. ``routes`` is filled by
    the first pass of an engine that replays routing.
    """

    batch: MicroBatch
    row: PackedRow
    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    selected: torch.Tensor | None = None
    fresh: torch.Tensor | None = None
    old_values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    routes: Routes | None = None

    def with_advantages(self, advantages: torch.Tensor) -> PreparedBatch:
        """The same with another advantage of each trained token, [N] fp32."""
        return replace(self, batch=replace(self.batch, advantages=advantages))

    def loss_inputs(
        self,
        logprobs: torch.Tensor,
        entropy: torch.Tensor,
        reduce: Callable[[torch.Tensor], torch.Tensor],
    ) -> LossInputs:
        """What a loss gets of this micro-batch.

        Args:
            logprobs: [N] of the current policy, with gradient.
            entropy: the same.
            reduce: sums a tensor over the context-parallel ranks.
        """
        batch = self.batch
        return LossInputs(
            logprobs=logprobs,
            entropy=entropy,
            old_logprobs=self.old_logprobs,
            rollout_logprobs=batch.rollout_logprobs,
            ref_logprobs=self.ref_logprobs,
            advantages=batch.advantages,
            sequences=self._sequences(reduce),
            selected=self.selected,
            fresh=self.fresh,
        )

    def value_inputs(
        self, values: torch.Tensor, reduce: Callable[[torch.Tensor], torch.Tensor]
    ) -> ValueInputs:
        """What a value loss gets of this micro-batch.

        Args:
            values: [N] of the current critic, with gradient.
            reduce: sums a tensor over the context-parallel ranks.
        """
        assert self.old_values is not None and self.returns is not None
        return ValueInputs(values, self.old_values, self.returns, self._sequences(reduce))

    def _sequences(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> Sequences:
        batch = self.batch
        device = batch.sequence_of.device
        num_trained = torch.tensor(batch.num_trained, dtype=torch.float32, device=device)
        return Sequences(batch.sequence_of, num_trained, reduce)
