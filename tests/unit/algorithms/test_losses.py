"""The loss as a whole: supervised, and policy loss with KL, entropy and correction."""

from __future__ import annotations

import pytest
import torch
from support.shared_sums import means

from mindspeed_rl.algorithms.aggregation import AGGREGATIONS
from mindspeed_rl.algorithms.losses import LossSettings, policy_loss, supervised_loss
from mindspeed_rl.algorithms.types import (
    Denominators,
    LossInputs,
    Sequences,
)

TOKENS = Denominators(tokens=10, sequences=4)


def inputs(
    ratios: list[float], advantages: list[float], *, ref: list[float] | None = None
) -> LossInputs:
    """Tokens of one sequence whose p / p_old are ``ratios``."""
    old = torch.linspace(-2.0, -0.5, len(ratios))
    logprobs = (old + torch.tensor(ratios).log()).requires_grad_()
    owners = torch.zeros(len(ratios), dtype=torch.int64)
    return LossInputs(
        logprobs=logprobs,
        entropy=torch.full_like(logprobs, 0.7).detach().requires_grad_(),
        old_logprobs=old,
        rollout_logprobs=old.clone(),
        ref_logprobs=None if ref is None else torch.tensor(ref),
        advantages=torch.tensor(advantages),
        sequences=Sequences(owners, torch.tensor([float(len(ratios))])),
    )


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_kl_and_entropy_share_the_aggregation(mode: str) -> None:
    """With an advantage of 0 they are all that is left."""
    data = inputs([1.0, 1.5, 0.5], [0.0] * 3, ref=[-1.0, -2.0, -3.0])
    settings = LossSettings(
        aggregation=mode, longest=16, kl_beta=0.5, kl_estimator="k2", entropy_weight=0.25
    )
    loss = policy_loss(data, settings, TOKENS).loss
    weight = {
        "token-mean": 1 / 10,
        "token-sum": 1.0,
        "seq-mean-token-sum": 1 / 4,
        "seq-mean-token-sum-norm": 1 / 4 / 16,
        "seq-mean-token-mean": 1 / 4 / 3,
    }[mode]
    distance = data.logprobs.detach() - data.ref_logprobs
    wanted = weight * (0.5 * distance.square().sum() / 2 - 0.25 * 0.7 * 3)
    torch.testing.assert_close(loss.detach(), wanted)
    slope, entropy = torch.autograd.grad(loss, [data.logprobs, data.entropy])
    torch.testing.assert_close(slope, 0.5 * weight * distance)
    torch.testing.assert_close(entropy, torch.full((3,), -0.25 * weight))


def test_supervised_loss() -> None:
    data = inputs([1.0, 1.0], [0.0, 0.0])
    outputs = supervised_loss(data, 10)
    assert outputs.loss.item() == pytest.approx(2.5 / 10)  # -log p is 2.0 and 0.5
    (gradient,) = torch.autograd.grad(outputs.loss, data.logprobs)
    torch.testing.assert_close(gradient, torch.full((2,), -0.1))
    assert means(outputs.terms)["loss"] == pytest.approx(1.25)
