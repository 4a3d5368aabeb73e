"""The loss as a whole: supervised, and policy loss with KL, entropy and correction."""

from __future__ import annotations

import math
from dataclasses import replace

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
from mindspeed_rl.trainer.logprobs import selected_logprobs

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


def test_padding_that_is_not_a_number_does_not_reach_loss_or_gradient() -> None:
    """NaN at untrained positions, and rows of the vocabulary that no token has: -inf or anything.

    The trained positions are picked before their logits exist, and padded rows are left out.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 8, generator=generator)
    hidden[[1, 4]] = math.nan
    hidden.requires_grad_()
    mask = torch.tensor([True, False, True, True, False, True])
    weight = torch.randn(16, 8, generator=generator)
    weight[11:] = math.inf
    weight.requires_grad_()

    def gradients(rows: torch.Tensor, table: torch.Tensor) -> list[torch.Tensor]:
        targets = torch.tensor([3, 10, 0, 7])
        logp, entropy = selected_logprobs(
            rows, table, targets, temperature=1.0, vocab_size=11, tp_rank=0, group=None, chunk=3
        )
        data = replace(
            inputs([1.0] * 4, [1.0, -1.0, 2.0, 0.5]), logprobs=logp, entropy=entropy,
            old_logprobs=None, ref_logprobs=torch.full((4,), -2.0),
        )  # fmt: skip
        settings = LossSettings(kl_beta=0.1, entropy_weight=0.1)
        loss = policy_loss(data, settings, TOKENS).loss
        return [loss.detach(), *torch.autograd.grad(loss, [rows, table])]

    loss, by_row, by_weight = gradients(hidden[mask].detach().requires_grad_(), weight)
    clean = weight[:11].detach().requires_grad_()
    wanted, wanted_row, wanted_weight = gradients(hidden[mask].detach().requires_grad_(), clean)
    torch.testing.assert_close(loss, wanted, rtol=0, atol=0)
    torch.testing.assert_close(by_row, wanted_row, rtol=0, atol=0)
    torch.testing.assert_close(by_weight[:11], wanted_weight, rtol=0, atol=0)
    assert by_weight[11:].eq(0).all()
    (through,) = torch.autograd.grad((hidden[mask] * by_row).sum(), hidden)
    assert through[mask].isfinite().all() and through[~mask].eq(0).all()
