"""Losses against closed forms and autograd; advantages of odd groups (R35, R37, R43)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl.algorithms.advantages import group_relative_advantages
from mindspeed_rl.algorithms.losses import (
    ClipSettings,
    clipped_policy_loss,
    mismatch_terms,
    supervised_loss,
)
from mindspeed_rl.algorithms.types import Denominators, LossInputs, LossOutputs, MaxTerm, MeanTerm

NAN = float("nan")
TOKENS = Denominators(tokens=10)


def inputs(
    ratios: list[float], advantages: list[float], *, ref: list[float] | None = None
) -> LossInputs:
    """Tokens whose p / p_old are ``ratios``."""
    old = torch.linspace(-2.0, -0.5, len(ratios))
    logprobs = (old + torch.tensor(ratios).log()).requires_grad_()
    return LossInputs(
        logprobs=logprobs,
        entropy=torch.full_like(logprobs, 0.7).detach().requires_grad_(),
        old_logprobs=old,
        rollout_logprobs=old.clone(),
        ref_logprobs=None if ref is None else torch.tensor(ref),
        advantages=torch.tensor(advantages),
    )


def mean_of(outputs: LossOutputs, name: str) -> float:
    term = outputs.terms[name]
    assert isinstance(term, MeanTerm)
    return float(term.sum / term.weight)


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "slope"),
    [
        # slope is d objective / d log p: ratio x advantage where the unclipped side is taken
        (1.0, 2.0, 2.0, 2.0),
        (1.25, 2.0, 2.5, 2.5),
        (1.5, 2.0, 2.6, 0.0),  # above 1 + 0.3: no reason to go further up
        (0.5, 2.0, 1.0, 1.0),  # below 1 - 0.1, but the reward pulls back
        (1.5, -2.0, -3.0, -3.0),
        (0.95, -2.0, -1.9, -1.9),
        (0.5, -2.0, -1.8, 0.0),  # below 1 - 0.1: no reason to go further down
    ],
)
def test_clipped_objective_of_one_token(
    ratio: float, advantage: float, objective: float, slope: float
) -> None:
    """min(r A, clip(r, 0.9, 1.3) A): the two bounds are not the same."""
    data = inputs([ratio], [advantage])
    settings = ClipSettings(eps_lower=0.1, eps_upper=0.3)
    outputs = clipped_policy_loss(data, settings, Denominators(tokens=4))
    assert outputs.loss.item() == pytest.approx(-objective / 4, rel=1e-6)
    (gradient,) = torch.autograd.grad(outputs.loss, data.logprobs)
    assert float(gradient) == pytest.approx(-slope / 4, rel=1e-5)
    assert mean_of(outputs, "policy/clip_fraction") == float(not 0.9 <= ratio <= 1.3)


def test_loss_equals_an_independent_formula() -> None:
    """All terms at once, value and gradient, against a per-token loop in double precision."""
    data = inputs([0.5, 0.9, 1.0, 1.1, 2.0], [1.0, -1.0, 0.5, 2.0, -0.5], ref=[-1.0] * 5)
    settings = ClipSettings(0.2, 0.28, kl_beta=0.1, entropy_weight=0.01)
    outputs = clipped_policy_loss(data, settings, TOKENS)
    logp = data.logprobs.detach().double().requires_grad_()
    assert data.old_logprobs is not None
    total = torch.zeros((), dtype=torch.float64)
    for i, advantage in enumerate(data.advantages.tolist()):
        ratio = torch.exp(logp[i] - data.old_logprobs[i].double())
        bounded = min(max(ratio, torch.tensor(0.8)), torch.tensor(1.28))
        kl = torch.exp(-1.0 - logp[i]) - (-1.0 - logp[i]) - 1.0
        total = total - min(ratio * advantage, bounded * advantage) + 0.1 * kl - 0.01 * 0.7
    assert outputs.loss.item() == pytest.approx(total.item() / 10, rel=1e-6)
    wanted = torch.autograd.grad(total / 10, logp)[0]
    found, entropy = torch.autograd.grad(outputs.loss, [data.logprobs, data.entropy])
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(entropy, torch.full((5,), -0.01 / 10))


def test_on_policy_gradient_is_that_of_reinforce() -> None:
    data = replace(inputs([1.7, 0.3], [2.0, -3.0]), old_logprobs=None)
    outputs = clipped_policy_loss(data, ClipSettings(), TOKENS)
    (gradient,) = torch.autograd.grad(outputs.loss, data.logprobs)
    torch.testing.assert_close(gradient, torch.tensor([-2.0, 3.0]) / 10)
    assert mean_of(outputs, "policy/clip_fraction") == 0.0
    deviation = outputs.terms["policy/ratio_max_deviation"]
    assert isinstance(deviation, MaxTerm)
    assert float(deviation.value) == 0.0


@given(st.lists(st.integers(0, 1), min_size=6, max_size=6))
@settings(deadline=None)
def test_micro_batches_add_up_to_the_batch(cut: list[int]) -> None:
    """Any split, empty parts included, gives the same loss and gradient (R35)."""
    data = inputs([0.5, 0.9, 1.0, 1.1, 2.0, 1.3], [1.0, -1.0, 0.5, 2.0, -0.5, 3.0], ref=[-1.0] * 6)
    settings = ClipSettings(kl_beta=0.1, entropy_weight=0.01)
    whole = clipped_policy_loss(data, settings, TOKENS).loss
    wanted = torch.autograd.grad(whole, data.logprobs, retain_graph=True)[0]
    parts = []
    for side in (0, 1):
        chosen = torch.tensor([i for i, c in enumerate(cut) if c == side], dtype=torch.int64)
        fields = {
            name: getattr(data, name)[chosen]
            for name in ("logprobs", "entropy", "old_logprobs", "rollout_logprobs")
        }
        fields |= {n: getattr(data, n)[chosen] for n in ("ref_logprobs", "advantages")}
        part = LossInputs(**fields)
        parts.append(clipped_policy_loss(part, settings, TOKENS).loss)
    torch.testing.assert_close(sum(parts), whole)
    found = torch.autograd.grad(torch.stack(parts).sum(), data.logprobs)[0]
    torch.testing.assert_close(found, wanted)


def test_huge_ratios_stay_finite() -> None:
    data = replace(inputs([1.0], [1.0]), old_logprobs=torch.tensor([-300.0]))
    outputs = clipped_policy_loss(data, ClipSettings(), TOKENS)
    assert math.isfinite(outputs.loss.item())


def test_a_kl_term_needs_a_reference() -> None:
    with pytest.raises(RuntimeError, match="kl_beta is set but there are no reference"):
        clipped_policy_loss(inputs([1.0], [1.0]), ClipSettings(kl_beta=0.1), TOKENS)


def test_supervised_loss() -> None:
    data = inputs([1.0, 1.0], [0.0, 0.0])
    outputs = supervised_loss(data, TOKENS)
    assert outputs.loss.item() == pytest.approx(2.5 / 10)  # -log p is 2.0 and 0.5
    (gradient,) = torch.autograd.grad(outputs.loss, data.logprobs)
    torch.testing.assert_close(gradient, torch.full((2,), -0.1))
    assert mean_of(outputs, "loss") == pytest.approx(1.25)


def test_mismatch_terms() -> None:
    """k3 of KL(engine || trainer): exp(d) - d - 1 with d = log p(trainer) - log p(engine)."""
    terms = mismatch_terms(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0]))
    worst, mean, k3 = (
        terms[f"mismatch/{n}"] for n in ("max_abs_logprob", "mean_abs_logprob", "k3")
    )
    assert isinstance(worst, MaxTerm)
    assert isinstance(mean, MeanTerm)
    assert isinstance(k3, MeanTerm)
    assert float(worst.value) == 0.5
    assert float(mean.sum / mean.weight) == 0.25
    assert float(k3.sum / k3.weight) == pytest.approx((math.exp(0.5) - 1.5) / 2)
    empty = mismatch_terms(torch.zeros(0), torch.zeros(0))["mismatch/max_abs_logprob"]
    assert isinstance(empty, MaxTerm)
    assert float(empty.value) == -math.inf


@pytest.mark.parametrize(
    ("rewards", "by_std", "centred"),
    [
        ([1.0, 0.0, 0.0, 1.0], [0.866, -0.866, -0.866, 0.866], [0.5, -0.5, -0.5, 0.5]),
        ([3.0, 1.0], [0.7071, -0.7071], [1.0, -1.0]),
        ([2.0, 2.0, 2.0], [0.0] * 3, [0.0] * 3),  # equal rewards teach nothing
        ([0.1 + 0.2, 0.3, 0.3], [0.0] * 3, [0.0] * 3),  # and rounding is no reward (R37)
        ([1.0, NAN, 0.0], [0.7071, 0.0, -0.7071], [0.5, 0.0, -0.5]),  # one abstained (R43)
        ([1.0, NAN, NAN], [0.0] * 3, [0.0] * 3),  # a single reward is relative to nothing
        ([NAN, NAN], [0.0] * 2, [0.0] * 2),
        ([5.0], [0.0], [0.0]),
        ([1e6 + 1, 1e6 - 1], [0.7071, -0.7071], [1.0, -1.0]),  # two passes: no cancellation
    ],
)
def test_advantages_of_a_group(
    rewards: list[float], by_std: list[float], centred: list[float]
) -> None:
    table = torch.tensor([rewards])
    found = group_relative_advantages(table, divide_by_std=True)
    torch.testing.assert_close(found, torch.tensor([by_std]), rtol=1e-3, atol=1e-6)
    found = group_relative_advantages(table, divide_by_std=False)
    torch.testing.assert_close(found, torch.tensor([centred]), rtol=1e-3, atol=1e-6)


@given(
    st.lists(st.lists(st.floats(-10, 10, width=32), min_size=4, max_size=4), min_size=1, max_size=5)
)
@settings(deadline=None)
def test_groups_do_not_see_each_other(rewards: list[list[float]]) -> None:
    table = torch.tensor(rewards)
    together = group_relative_advantages(table, divide_by_std=True)
    alone = [group_relative_advantages(row[None], divide_by_std=True) for row in table]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=0)
    assert together.isfinite().all()
    assert (together.sum(1).abs() < 1e-3).all()
