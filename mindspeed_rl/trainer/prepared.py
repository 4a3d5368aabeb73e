"""A micro-batch as every pass over it sees it.

Shapes: N trained tokens of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from mindspeed_rl.algorithms.types import LossInputs, Sequences
from mindspeed_rl.data.packing import MicroBatch
from mindspeed_rl.trainer.packed_attention import PackedRow


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A micro-batch on the device with its attention borders; reused by every pass over it.

    ``old_logprobs`` and ``ref_logprobs`` are [N] fp32, ``selected`` and ``fresh`` [N] bool, each on
    the last pipeline stage once computed.
    """

    batch: MicroBatch
    row: PackedRow
    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    selected: torch.Tensor | None = None
    fresh: torch.Tensor | None = None

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
        num_trained = torch.tensor(batch.num_trained, dtype=torch.float32, device=logprobs.device)
        return LossInputs(
            logprobs=logprobs,
            entropy=entropy,
            old_logprobs=self.old_logprobs,
            rollout_logprobs=batch.rollout_logprobs,
            ref_logprobs=self.ref_logprobs,
            advantages=batch.advantages,
            sequences=Sequences(batch.sequence_of, num_trained, reduce),
            selected=self.selected,
            fresh=self.fresh,
        )
