"""KL estimators, their gradients and the adaptive coefficient against closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mindspeed_rl.algorithms.kl import KL_ESTIMATORS, MAX_K3, adapted_coefficient, kl_estimate

DIFFERENCES = np.array([-1.5, -0.1, 0.0, 0.3, 2.0])  # log p - log p_ref
VALUES = {
    "k1": DIFFERENCES,
    "abs": np.abs(DIFFERENCES),
    "k2": DIFFERENCES**2 / 2,
    "k3": np.expm1(-DIFFERENCES) + DIFFERENCES,
}
SLOPES = {
    "k1": np.ones(5),
    "abs": np.sign(DIFFERENCES),
    "k2": DIFFERENCES,
    "k3": 1 - np.exp(-DIFFERENCES),
}


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_value_and_gradient(estimator: str) -> None:
    """A trailing + has the value of the estimator and the gradient of k2."""
    reference = torch.linspace(-3, -2, 5, dtype=torch.float64)
    logprobs = (reference + torch.from_numpy(DIFFERENCES)).requires_grad_()
    found = kl_estimate(logprobs, reference, estimator)
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    name = estimator.removesuffix("+")
    slope = "k2" if estimator.endswith("+") else name
    np.testing.assert_allclose(found.detach().numpy(), VALUES[name], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(gradient.numpy(), SLOPES[slope], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("nats", [-300.0, 300.0])
def test_far_apart_stays_finite(estimator: str, nats: float) -> None:
    logprobs = torch.tensor([-400.0 + nats], requires_grad=True)
    found = kl_estimate(logprobs, torch.tensor([-400.0]), estimator)
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    assert found.isfinite().all() and gradient.isfinite().all()


def test_k3_is_exact_and_never_negative_near_0() -> None:
    """In fp32, where exp(-d) + d - 1 would be rounding errors of either sign."""
    steps = np.concatenate([np.geomspace(1e-9, 1.0, 4001), [0.0]])
    difference = np.concatenate([steps, -steps]).astype(np.float32)
    logprobs = torch.from_numpy(difference)
    found = kl_estimate(logprobs, torch.zeros_like(logprobs), "k3").numpy()
    assert found.dtype == np.float32 and (found >= 0).all()
    d = difference.astype(np.float64)
    # d^2 / 2 - d^3 / 6 + ... would lose no digits; expm1 in fp64 loses none that fp32 has.
    exact = np.where(np.abs(d) < 1e-4, d**2 / 2 - d**3 / 6, np.expm1(-d) + d)
    np.testing.assert_allclose(found, exact, rtol=1e-6, atol=6e-8 * np.abs(d).max())
    small = np.abs(d) < 1e-3
    assert (np.abs(found - exact)[small] <= 6e-8 * np.abs(d)[small] + 1e-12).all()


@pytest.mark.parametrize("estimator", ["k3", "k3+"])
def test_a_token_far_from_the_reference_does_not_outweigh_the_rest(estimator: str) -> None:
    """At most 10 in value; a gradient of at most 12.6 for k3, whose clamp stops it beyond."""
    difference = torch.linspace(-19.0, 19.0, 3801, dtype=torch.float64)
    logprobs = difference.clone().requires_grad_()
    found = kl_estimate(logprobs, torch.zeros_like(difference), estimator)
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    d, found = difference.numpy(), found.detach()
    exact = np.expm1(-d) + d
    np.testing.assert_allclose(found.numpy(), np.minimum(exact, MAX_K3), rtol=1e-9, atol=1e-9)
    slope = np.where(exact <= MAX_K3, 1 - np.exp(-d), 0.0) if estimator == "k3" else d
    np.testing.assert_allclose(gradient.numpy(), slope, rtol=1e-9, atol=1e-9)
    assert float(found.max()) == MAX_K3 == 10.0
    assert estimator == "k3+" or float(gradient.abs().max()) <= 12.7


@pytest.mark.parametrize(
    ("kl", "factor"),
    [(0.1, 1.0), (0.105, 1 + 0.05 * 0.256), (5.0, 1 + 0.2 * 0.256), (0.0, 1 - 0.2 * 0.256)],
)
def test_adapted_coefficient(kl: float, factor: float) -> None:
    found = adapted_coefficient(0.05, kl, target=0.1, horizon=1000, num_samples=256)
    assert found == pytest.approx(0.05 * factor, rel=1e-9)


@pytest.mark.parametrize("num_samples", [1000, 65536])
def test_the_coefficient_keeps_its_sign(num_samples: int) -> None:
    """A KL far below its target, and more samples in a step than the horizon."""
    found = adapted_coefficient(0.1, 1e-6, target=0.1, horizon=1000, num_samples=num_samples)
    assert found == pytest.approx(0.08)
