"""KL estimators, their gradients and the adaptive coefficient against closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mindspeed_rl.algorithms.kl import KL_ESTIMATORS, adapted_coefficient, kl_estimate

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
