"""From losses of tokens to the loss of an optimizer step: one weight per token.

Shapes: N trained tokens of one micro-batch. The denominators are global, so the weighted sums
of all micro-batches and ranks add up to the loss, whatever the split.

A new aggregation is a function here with its declaration above it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mindspeed_rl.algorithms.catalogue import Catalogue, Choice

if TYPE_CHECKING:
    import torch

    from mindspeed_rl.algorithms.types import Denominators, Sequences


@dataclass(frozen=True, slots=True)
class Counts:
    """What the weights of the tokens of a micro-batch are made of.

    Attributes:
        ones: [N] fp32.
        sequences: of the micro-batch.
        total: of the optimizer step; sequences without a trained token do not count.
        longest: the limit on the length of a response, in tokens.
    """

    ones: torch.Tensor
    sequences: Sequences
    total: Denominators
    longest: int

    @property
    def per_sequence(self) -> torch.Tensor:
        """1 / sequences, [N]."""
        return self.ones / max(1, self.total.sequences)


Weights = Callable[[Counts], "torch.Tensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregation(Choice):
    """A way of making one loss of those of tokens; ``weights`` are [N] fp32."""

    weights: Weights


AGGREGATIONS: Catalogue[Aggregation] = Catalogue("--rl-loss-aggregation")


def _aggregation(name: str, summary: str, source: str = "") -> Callable[[Weights], Weights]:
    """Declare a function as the weights of an aggregation."""

    def declare(function: Weights) -> Weights:
        AGGREGATIONS.add(Aggregation(name=name, summary=summary, source=source, weights=function))
        return function

    return declare


@_aggregation("token-mean", "1 / tokens", "arXiv:2503.14476")
def _token_mean(counts: Counts) -> torch.Tensor:
    return counts.ones / max(1, counts.total.tokens)


@_aggregation("token-sum", "1")
def _token_sum(counts: Counts) -> torch.Tensor:
    return counts.ones


@_aggregation("seq-mean-token-sum", "1 / sequences")
def _sequence_mean_of_sums(counts: Counts) -> torch.Tensor:
    return counts.per_sequence


@_aggregation(
    "seq-mean-token-sum-norm",
    "1 / (sequences x --rollout-max-response-length), a constant where the length of the own "
    "sequence would favour short answers",
    "arXiv:2503.20783",
)
def _sequence_mean_of_scaled_sums(counts: Counts) -> torch.Tensor:
    return counts.per_sequence / counts.longest


@_aggregation("seq-mean-token-mean", "1 / (sequences x tokens of its sequence)", "arXiv:2402.03300")
def _sequence_mean_of_means(counts: Counts) -> torch.Tensor:
    return counts.per_sequence / counts.sequences.spread(counts.sequences.num_trained)


def token_weights(
    mode: str, sequences: Sequences, denominators: Denominators, longest: int
) -> torch.Tensor:
    """Weight of each trained token in the loss.

    Args:
        mode: a name of :data:`AGGREGATIONS`.
        sequences: of the micro-batch.
        denominators: of the optimizer step; sequences without a trained token do not count.
        longest: the limit on the length of a response, in tokens.

    Returns:
        [N] fp32.
    """
    ones = sequences.num_trained.new_ones(sequences.of_token.shape)
    return AGGREGATIONS[mode].weights(Counts(ones, sequences, denominators, longest))
