"""The KL over the whole vocabulary against its definition in fp64, value and gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl.core.logit_tiles import LogitTile
from mindspeed_rl.distillation.full_kl import KLSettings, reverse_kl
from mindspeed_rl.trainer.weight_gradient import WeightGradient

H, K = 6, 9  # hidden sizes of policy and teacher


def drawn(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def definition(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    logp = (hidden.double() @ weight.double().t() / temperature).log_softmax(-1)
    logq = (teacher_hidden.double() @ teacher_weight.double().t() / temperature).log_softmax(-1)
    return (logp.exp() * (logp - logq)).sum(-1)


def settings_of(num_ids: int, tile: LogitTile, temperature: float = 0.7) -> KLSettings:
    return KLSettings(temperature, num_ids, tile, None, WeightGradient())


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 9),
    ids=st.integers(1, 23),
    padding=st.integers(0, 4),
    rows=st.integers(1, 5),
    columns=st.integers(1, 9),
    scale=st.sampled_from([0.3, 3.0, 30.0]),
    seed=st.integers(0, 1000),
)
def test_value_and_gradients_are_those_of_the_definition(
    tokens: int, ids: int, padding: int, rows: int, columns: int, scale: float, seed: int
) -> None:
    """Whatever the blocks; rows behind the vocabulary count for nothing."""
    hidden = drawn(seed, tokens, H).requires_grad_()
    weight = drawn(seed + 1, ids + padding, H, scale=scale).requires_grad_()
    teacher_hidden, teacher_weight = drawn(seed + 2, tokens, K), drawn(seed + 3, ids + padding, K)
    factor = drawn(seed + 4, tokens)
    how = settings_of(ids, LogitTile(rows, columns))
    found = reverse_kl(hidden, weight, teacher_hidden, teacher_weight, how)
    wanted = definition(hidden, weight[:ids], teacher_hidden, teacher_weight[:ids], 0.7)
    size = max(1.0, float(wanted.detach().abs().max())) if tokens else 1.0
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5 * size)
    ours = torch.autograd.grad((found * factor).sum(), [hidden, weight])
    theirs = torch.autograd.grad((wanted * factor).sum(), [hidden, weight])
    for mine, reference in zip(ours, theirs, strict=True):
        # The gradient grows with the weights, which multiply the logits.
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-4 * size * scale)


def test_a_teacher_that_is_the_policy_has_no_distance_and_no_gradient() -> None:
    hidden, weight = drawn(0, 5, H).requires_grad_(), drawn(1, 11, H)
    kl = reverse_kl(hidden, weight, hidden.detach(), weight, settings_of(11, LogitTile(2, 4)))
    assert kl.abs().max() < 1e-6
    (slope,) = torch.autograd.grad(kl.sum(), hidden)
    assert slope.abs().max() < 1e-6


@pytest.mark.parametrize("size", [1e3, 1e4])
def test_logits_that_no_exponential_holds(size: float) -> None:
    """Both distributions are one token each; the distance is that of two logits."""
    eye = torch.eye(4)
    hidden = (size * eye[:1]).requires_grad_()
    kl = reverse_kl(hidden, eye, size * eye[1:2], eye, settings_of(4, LogitTile(1, 3), 1.0))
    assert kl.item() == pytest.approx(size)
    (slope,) = torch.autograd.grad(kl.sum(), hidden)
    assert slope.isfinite().all()


def test_the_gradient_of_the_weight_goes_where_it_is_kept() -> None:
    """Into ``main_grad``, on top of what is there; autograd gets none then."""
    hidden, teacher = drawn(0, 5, H), drawn(1, 5, K)
    weight, teacher_weight = drawn(2, 7, H).requires_grad_(), drawn(3, 7, K)
    how = settings_of(7, LogitTile(5, 7))
    (alone,) = torch.autograd.grad(
        reverse_kl(hidden, weight, teacher, teacher_weight, how).sum(), weight
    )
    kept = torch.full_like(weight, 0.25).detach()
    weight.main_grad = kept  # type: ignore[attr-defined]
    reverse_kl(hidden, weight, teacher, teacher_weight, how).sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is None
    torch.testing.assert_close(kept, alone + 0.25)
