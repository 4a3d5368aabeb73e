"""From losses of tokens to the loss of an optimizer step: one weight per token.

Shapes: N trained tokens of one micro-batch. The denominators are global, so the weighted sums
of all micro-batches and ranks add up to the loss, whatever the split.
"""

from __future__ import annotations

import torch

from mindspeed_rl.algorithms.types import Denominators, Sequences


def token_weights(
    mode: str, sequences: Sequences, denominators: Denominators, longest: int
) -> torch.Tensor:
    """Weight of each trained token in the loss.

    token-mean: 1 / tokens (Yu et al. 2025, arXiv:2503.14476). token-sum: 1. seq-mean-token-sum:
    1 / sequences. seq-mean-token-sum-norm: 1 / (sequences longest), a constant where the length of
    the own sequence would favour short answers (Liu et al. 2025, arXiv:2503.20783).
    seq-mean-token-mean: 1 / (sequences tokens of the own sequence) (Shao et al. 2024,
    arXiv:2402.03300).

    Args:
        mode: a value of ``--rl-loss-aggregation``.
        sequences: of the micro-batch.
        denominators: of the optimizer step; sequences without a trained token do not count.
        longest: the limit on the length of a response, in tokens.

    Returns:
        [N] fp32.
    """
    ones = torch.ones_like(sequences.of_token, dtype=sequences.num_trained.dtype)
    if mode == "token-sum":
        return ones
    if mode == "token-mean":
        return ones / max(1, denominators.tokens)
    per_sequence = ones / max(1, denominators.sequences)
    if mode == "seq-mean-token-sum":
        return per_sequence
    if mode == "seq-mean-token-sum-norm":
        return per_sequence / longest
    assert mode == "seq-mean-token-mean", mode
    return per_sequence / sequences.spread(sequences.num_trained)
