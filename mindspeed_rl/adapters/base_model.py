"""The model under the adapters of a policy, as a model that only computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The base of a policy with adapters; it shares all weights and needs no memory of its own.

    Its methods are those that a reference needs, with the meaning that ``TrainEngine`` gives them.

    Attributes:
        policy: The ``TrainEngine`` with adapters.
    """

    policy: Any

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has log-probs."""
        return bool(self.policy.is_last_stage)

    @property
    def is_metrics_rank(self) -> bool:
        """Whether this rank reports metrics of tokens that all tensor-parallel ranks share."""
        return bool(self.policy.is_metrics_rank)

    def prepare(self, batches: Sequence[Any]) -> list[Any]:
        """Cut micro-batches to this rank's tokens and move them to the device. Local."""
        prepared: list[Any] = self.policy.prepare(batches)
        return prepared

    def logprobs(self, batches: Sequence[Any]) -> list[torch.Tensor | None]:
        """Return log p of the trained tokens under the base, [N] fp32 per micro-batch.

        Collective over the pipeline and tensor-parallel groups.
        """
        with self.policy.without_adapters():
            found: list[torch.Tensor | None] = self.policy.logprobs(batches)
        return found
