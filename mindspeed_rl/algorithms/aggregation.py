"""Aggregations: each gives the loss of a token its weight in the loss of an optimizer step.

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


Weights = Callable[["Sequences", "Denominators", int], "torch.Tensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregation(Choice):
    """A way to combine the losses of tokens into one.

    Attributes:
        formula: Takes the arguments of :func:`token_weights` except the first.
    """

    formula: Weights


AGGREGATIONS = Catalogue("--rl-loss-aggregation", Aggregation)


@AGGREGATIONS.declare("1 / tokens", "arXiv:2503.14476", name="token-mean")
def _token_mean(sequences: Sequences, denominators: Denominators, longest: int) -> torch.Tensor:
    return sequences.ones / max(1, denominators.tokens)


@AGGREGATIONS.declare("1", name="token-sum")
def _token_sum(sequences: Sequences, denominators: Denominators, longest: int) -> torch.Tensor:
    return sequences.ones


@AGGREGATIONS.declare("1 / sequences", name="seq-mean-token-sum")
def _sequence_sum(sequences: Sequences, denominators: Denominators, longest: int) -> torch.Tensor:
    return sequences.ones / max(1, denominators.sequences)


@AGGREGATIONS.declare(
    "1 / (sequences x --rollout-max-response-length), a constant where the length of the own "
    "sequence would favour short answers",
    "arXiv:2503.20783",
    name="seq-mean-token-sum-norm",
)
def _scaled_sum(sequences: Sequences, denominators: Denominators, longest: int) -> torch.Tensor:
    return _sequence_sum(sequences, denominators, longest) / longest


@AGGREGATIONS.declare(
    "1 / (sequences x tokens of its sequence)", "arXiv:2402.03300", name="seq-mean-token-mean"
)
def _sequence_mean(sequences: Sequences, denominators: Denominators, longest: int) -> torch.Tensor:
    per_sequence = _sequence_sum(sequences, denominators, longest)
    return per_sequence / sequences.spread(sequences.num_trained)


def token_weights(
    mode: str, sequences: Sequences, denominators: Denominators, longest: int
) -> torch.Tensor:
    """Return the weight of each trained token in the loss.

    Args:
        mode: A name of :data:`AGGREGATIONS`.
        sequences: Sequences of the micro-batch.
        denominators: Counts of the optimizer step; sequences without a trained token do not count.
        longest: Limit on the length of a response, in tokens.

    Returns:
        [N] fp32.
    """
    return AGGREGATIONS[mode].formula(sequences, denominators, longest)
