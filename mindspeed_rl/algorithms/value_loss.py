"""The loss of a critic, and how well its values predict the returns.

Shapes: N trained tokens of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mindspeed_rl.algorithms.aggregation import token_weights
from mindspeed_rl.algorithms.types import Denominators, LossOutputs, MeanTerm, ValueInputs


def value_loss(
    inputs: ValueInputs,
    denominators: Denominators,
    *,
    clip: float,
    aggregation: str = "token-mean",
    longest: int = 1,
) -> LossOutputs:
    """1/2 max((V - R)^2, (V_clipped - R)^2), V_clipped within ``clip`` of the old value.

    The clip is that of the reference code of PPO (Engstrom et al. 2020, arXiv:2005.12729, section
    3). Tokens without a target add nothing and stay in the denominators. ``value/loss`` is the
    aggregated loss, averaged over optimizer steps; the other means are over tokens with a target.

    Args:
        inputs: Values and their targets.
        denominators: Counts of the optimizer step.
        clip: How far a value may move from its old one and still lower its loss; 0: any distance.
        aggregation: Weights of the tokens, see :func:`token_weights`.
        longest: Limit on the length of a response, in tokens.
    """
    values = inputs.values
    known = ~inputs.returns.isnan()
    returns = torch.where(known, inputs.returns, values.detach())
    loss = (values - returns).square()
    outside = torch.zeros_like(known)
    if clip:
        low, high = inputs.old_values - clip, inputs.old_values + clip
        held = (torch.minimum(torch.maximum(values, low), high) - returns).square()
        outside = (held > loss) & known
        loss = torch.maximum(loss, held)
    weights = token_weights(aggregation, inputs.sequences, denominators, longest).to(values.dtype)
    total = (0.5 * loss * known * weights).sum()
    count = values.new_tensor(float(values.numel()))
    with_target = known.sum().to(values.dtype)
    return LossOutputs(
        total,
        {
            "value/loss": MeanTerm(total.detach(), count / max(1, denominators.tokens)),
            "value/clip_fraction": MeanTerm(outside.sum().to(values.dtype), with_target),
            "value/mean": MeanTerm((values.detach() * known).sum(), with_target),
            "value/return_mean": MeanTerm((returns * known).sum(), with_target),
        },
    )


def explained_variance(
    returns: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    reduce: Callable[[torch.Tensor], torch.Tensor],
) -> float:
    """1 - Var(R - V) / Var(R) over all tokens with a target: 1 is a perfect critic.

    0 is a critic no better than the mean; negative is worse. 0 where all returns are equal.
    Collective as ``reduce``: two calls.

    Args:
        returns: [N] of each micro-batch of this rank, NaN where there is no target.
        values: [N] of the same tokens.
        reduce: Sums a tensor over the ranks that hold the other tokens.
    """
    targets = torch.cat(list(returns))
    none, errors = targets.isnan(), targets - torch.cat(list(values))

    def total(values: torch.Tensor) -> torch.Tensor:
        return values.masked_fill(none, 0.0).sum()

    count = (~none).sum().to(targets)
    sums = reduce(torch.stack([total(targets), total(errors), count]))
    mean, bias = (sums[:2] / sums[2].clamp(min=1)).unbind()
    squares = reduce(
        torch.stack([total((targets - mean).square()), total((errors - bias).square())])
    )
    spread, rest = squares.tolist()
    return 1.0 - rest / spread if spread > 0 else 0.0
