"""Types of the inputs and outputs of losses.

Shapes: N trained tokens and S sequences of one micro-batch. Under context parallelism N are the
tokens of this rank, while S counts whole sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SumOverRanks = Callable[["torch.Tensor"], "torch.Tensor"]
"""Sums a tensor over the ranks that share the tokens or sequences in question."""


@dataclass(frozen=True, slots=True)
class MeanTerm:
    """Part of a mean: both fields are sums over this micro-batch, on its device."""

    sum: torch.Tensor
    weight: torch.Tensor


@dataclass(frozen=True, slots=True)
class MaxTerm:
    """Candidate for a maximum over all micro-batches and ranks."""

    value: torch.Tensor

    @classmethod
    def of(cls, values: torch.Tensor) -> MaxTerm:
        """The largest of [N] values; minus infinity when there are none."""
        return cls(values.max() if values.numel() else values.new_tensor(-math.inf))


Term = MeanTerm | MaxTerm


@dataclass(frozen=True, slots=True)
class Denominators:
    """Global counts of one optimizer step, over all micro-batches and data-parallel ranks.

    Attributes:
        tokens: Number of trained tokens.
        sequences: Number of sequences with at least one trained token.
    """

    tokens: int
    sequences: int

    @classmethod
    def of(cls, num_trained: Iterable[int]) -> Denominators:
        """Count samples that have ``num_trained`` trained tokens each."""
        counts = tuple(num_trained)
        return cls(sum(counts), sum(count > 0 for count in counts))


def _alone(values: torch.Tensor) -> torch.Tensor:
    return values


@dataclass(frozen=True, slots=True)
class Sequences:
    """Which tokens of a micro-batch belong to the same sequence.

    Attributes:
        of_token: [N] int64, which of the S sequences a token belongs to.
        num_trained: [S] fp32, trained tokens of each whole sequence, on whatever ranks they are.
        reduce: Sums a tensor over the ranks that share the sequences (context parallelism); the
            default is for one rank. A loss calls it equally often on all of them.
    """

    of_token: torch.Tensor
    num_trained: torch.Tensor
    reduce: Callable[[torch.Tensor], torch.Tensor] = _alone

    @property
    def ones(self) -> torch.Tensor:
        """1 for each token, [N] fp32."""
        return self.num_trained.new_ones(self.of_token.shape)

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over each whole sequence: [N] -> [S], without gradient. Collective as ``reduce``."""
        local = values.new_zeros(self.num_trained.shape)
        return self.reduce(local.index_add_(0, self.of_token, values.detach()))

    def means(self, values: torch.Tensor) -> torch.Tensor:
        """Mean over each whole sequence: [N] -> [S]; 0 where nothing is trained. Collective."""
        return self.sums(values) / self.num_trained.clamp(min=1)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Give each token the value of its sequence: [S] -> [N]."""
        return values[self.of_token]


@dataclass(frozen=True, slots=True)
class LossInputs:
    """One micro-batch as a loss sees it: all [N] fp32 at trained tokens, in nats.

    Attributes:
        logprobs: Log-probs of the current policy, with gradient.
        entropy: Entropy of the current policy, with gradient.
        old_logprobs: Log-probs of the behaviour policy in the ratio; ``None``: the current policy.
        rollout_logprobs: Log-probs of the engine.
        ref_logprobs: Log-probs of the reference policy; ``None`` when there is none.
        advantages: Advantage of each token, by the rewards.
        sequences: Sequence of each token.
        covariance_mask: [N] bool, tokens chosen over the whole step; ``None`` when there are none.
        on_policy_mask: [N] bool, tokens sampled by the weights of this step; ``None``: all of them.
        teacher_logprobs: Log-probs of the teachers, NaN where a token has none; ``None`` when the
            run has no teacher.
        teacher_kl: Reverse KL to the teachers over the whole vocabulary, with gradient, 0 where a
            token has none; ``None`` unless the loss has it.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    old_logprobs: torch.Tensor | None
    rollout_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    sequences: Sequences
    covariance_mask: torch.Tensor | None = None
    on_policy_mask: torch.Tensor | None = None
    teacher_logprobs: torch.Tensor | None = None
    teacher_kl: torch.Tensor | None = None

    @property
    def log_ratio(self) -> torch.Tensor:
        """log p - log p_old, [N] with gradient; exactly 0 when the policy is its own old one."""
        old = self.logprobs.detach() if self.old_logprobs is None else self.old_logprobs
        return self.logprobs - old


@dataclass(frozen=True, slots=True)
class ValueInputs:
    """One micro-batch as a value loss sees it: all [N] fp32 at trained tokens.

    Attributes:
        values: Values of the current critic, before each token, with gradient.
        old_values: Values of the critic at the start of the RL step.
        returns: Targets; NaN at tokens of a sample whose reward abstained.
        sequences: Sequence of each token.
    """

    values: torch.Tensor
    old_values: torch.Tensor
    returns: torch.Tensor
    sequences: Sequences


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """The part of one micro-batch in the loss of the step, and the terms to report.

    Attributes:
        loss: 0-d; the parts of all micro-batches and ranks add up to the loss.
        terms: Terms by metric name.
    """

    loss: torch.Tensor
    terms: Mapping[str, Term] = field(default_factory=dict)
