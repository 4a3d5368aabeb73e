"""The loss as a whole: supervised, and policy loss with KL, entropy and correction."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.shared_sums import means

from mindspeed_rl.algorithms.aggregation import AGGREGATIONS
from mindspeed_rl.algorithms.losses import (
    TEACHER_KL,
    LossSettings,
    policy_loss,
    supervised_loss,
)
from mindspeed_rl.algorithms.types import (
    Denominators,
    LossInputs,
    MeanTerm,
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


def test_a_teacher_adds_to_the_advantages() -> None:
    """By its log-prob less the old policy's, bounded; not where a token has none (NaN)."""
    data = inputs([1.0, 1.0, 1.0, 1.0], [0.5, 0.5, 0.5, 0.5])
    old = data.logprobs.detach()
    teacher = old + torch.tensor([0.3, -0.8, 50.0, float("nan")])
    settings = LossSettings(teacher_weight=0.25)
    found = policy_loss(replace(data, teacher_logprobs=teacher), settings, TOKENS)
    (slope,) = torch.autograd.grad(found.loss, data.logprobs)
    advantages = 0.5 + 0.25 * torch.tensor([0.3, -0.8, 20.0, 0.0])
    torch.testing.assert_close(slope, -advantages / 10)
    distance = found.terms[TEACHER_KL]
    assert isinstance(distance, MeanTerm)
    assert distance.weight == 3 and distance.sum == pytest.approx(-(0.3 - 0.8 + 20.0))


def test_without_old_log_probs_the_teacher_is_compared_with_the_present_ones() -> None:
    data = inputs([1.5, 0.5], [0.0, 0.0])
    present = data.logprobs.detach()
    data = replace(data, old_logprobs=None, teacher_logprobs=present + torch.tensor([0.4, -0.6]))
    loss = policy_loss(data, LossSettings(teacher_weight=2.0), TOKENS).loss
    (slope,) = torch.autograd.grad(loss, data.logprobs)
    torch.testing.assert_close(slope, -2.0 * torch.tensor([0.4, -0.6]) / 10)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_the_full_kl_to_a_teacher_has_the_weights_of_the_aggregation(mode: str) -> None:
    data = inputs([1.0, 1.5, 0.5], [0.0] * 3)
    kl = torch.tensor([0.2, 0.0, 1.1]).requires_grad_()
    settings = LossSettings(aggregation=mode, longest=16, teacher_kl_weight=0.5)
    found = policy_loss(replace(data, teacher_kl=kl), settings, TOKENS)
    weight = {"token-mean": 1 / 10, "seq-mean-token-mean": 1 / 4 / 3}[mode]
    torch.testing.assert_close(found.loss.detach(), torch.tensor(0.5 * weight * 1.3))
    (slope,) = torch.autograd.grad(found.loss, kl)
    torch.testing.assert_close(slope, torch.full((3,), 0.5 * weight))
    distance = found.terms[TEACHER_KL]
    assert isinstance(distance, MeanTerm)
    assert distance.weight == 3 and distance.sum == pytest.approx(1.3)
