"""What goes into a policy loss and what comes out.

Shapes: N trained tokens of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class MeanTerm:
    """A share of a mean: both parts are sums over this micro-batch, on its device."""

    sum: torch.Tensor
    weight: torch.Tensor


@dataclass(frozen=True, slots=True)
class MaxTerm:
    """A candidate for a maximum over everything."""

    value: torch.Tensor


Term = MeanTerm | MaxTerm


@dataclass(frozen=True, slots=True)
class Denominators:
    """Global counts of one optimizer step, over all micro-batches and data-parallel ranks (R35).

    Attributes:
        tokens: trained tokens.
    """

    tokens: int


@dataclass(frozen=True, slots=True)
class LossInputs:
    """One micro-batch as a loss sees it: all [N] fp32 at trained tokens, in nats.

    Attributes:
        logprobs: of the current policy, with gradient.
        entropy: of the current policy, with gradient.
        old_logprobs: of the behaviour policy in the ratio; ``None``: the current policy's own.
        rollout_logprobs: the engine's.
        ref_logprobs: of the reference policy; ``None`` when there is none.
        advantages: of each token.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    old_logprobs: torch.Tensor | None
    rollout_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """The share of one micro-batch in the loss of the step, and what to report.

    Attributes:
        loss: 0-d; the shares of all micro-batches and ranks add up to the loss.
        terms: by metric name.
    """

    loss: torch.Tensor
    terms: Mapping[str, Term] = field(default_factory=dict)
