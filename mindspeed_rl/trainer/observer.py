"""What is told of the passes of a model to whoever looks at its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from mindspeed_rl.samples.packing import MicroBatch


class PassObserver:
    """Is called by a :class:`TrainEngine` on every rank; this one does nothing.

    No call may change a number, and each is collective only where it says so.
    """

    def begin_pass(self, batches: Sequence[MicroBatch], *, backward: bool) -> None:
        """A pass over prepared micro-batches begins, with ``backward`` that of an update."""

    def forward(self, batch: MicroBatch) -> AbstractContextManager[None]:
        """Return the context of the forward pass of the chunk of this rank over a micro-batch.

        What the backward pass computes again is outside of it.
        """
        return nullcontext()

    def outputs(self, batch: MicroBatch, outputs: Sequence[torch.Tensor]) -> None:
        """The head has computed its outputs [N] of a micro-batch; on the last stage."""

    def reduced_gradients(self) -> None:
        """Gradients are reduced and not clipped yet. Collective: the training grid."""

    def updated(self) -> None:
        """Weights are those after the optimizer step. Collective: the training grid."""
