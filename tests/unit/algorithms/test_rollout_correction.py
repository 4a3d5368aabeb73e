"""Importance weights, masks and rejection against per-sequence loops in numpy."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.shared_sums import Reduce, means, on_ranks
from support.waits import Waits

from mindspeed_rl.algorithms.correction import (
    CORRECTION_LEVELS,
    CorrectionSettings,
    correct,
    derived_mismatch,
    mismatch_terms,
)
from mindspeed_rl.algorithms.losses import LossSettings, policy_loss
from mindspeed_rl.algorithms.types import (
    Denominators,
    LossInputs,
    MaxTerm,
    Sequences,
)

LENGTHS = (4, 1, 0, 6, 3)
COUNTS = torch.tensor(LENGTHS)
OWNERS = torch.repeat_interleave(COUNTS)


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the trainer and of the engine; one token is far off."""
    generator = torch.Generator().manual_seed(0)
    engine = -torch.rand(14, dtype=torch.float64, generator=generator) * 3
    trainer = engine + 0.2 * torch.randn(14, dtype=torch.float64, generator=generator)
    trainer[7] -= 2.0
    return trainer, engine


def sequences(reduce: Reduce | None = None, chosen: torch.Tensor | None = None) -> Sequences:
    owners = OWNERS if chosen is None else OWNERS[chosen]
    return Sequences(owners, COUNTS.double(), reduce) if reduce else Sequences(owners, COUNTS)


def over(values: np.ndarray, level: str) -> np.ndarray:
    rows = np.split(values, np.cumsum(LENGTHS)[:-1])
    if level == "token":
        return values
    fold = np.sum if level == "sequence" else np.mean
    return np.concatenate([np.full(len(r), fold(r)) for r in rows if len(r)])


def expected(s: CorrectionSettings) -> np.ndarray:
    trainer, engine = (t.numpy() for t in tokens())
    d = trainer - engine
    weights = np.ones(14)
    if s.weighted:
        rho = np.exp(over(d, s.level))
        if s.mode == "truncate":
            weights = np.minimum(rho, s.upper)
        else:
            weights = np.where((rho >= s.lower) & (rho <= s.upper), rho, 0.0)
    if s.rejection != "none":
        k = {"k1": -d, "k2": d**2 / 2, "k3": np.expm1(d) - d}[s.rejection]
        weights = weights * (np.abs(over(k, s.rejection_level)) <= s.rejection_threshold)
    return weights


@pytest.mark.parametrize("level", CORRECTION_LEVELS)
@pytest.mark.parametrize("mode", ["", "truncate", "mask"])
@pytest.mark.parametrize(
    ("rejection", "threshold"), [("none", 0.0), ("k1", 0.3), ("k2", 0.05), ("k3", 0.05)]
)
def test_weights(level: str, mode: str, rejection: str, threshold: float) -> None:
    """Every combination, whole and with the tokens scattered over three ranks."""
    trainer, engine = tokens()
    for other in CORRECTION_LEVELS:
        settings = CorrectionSettings(
            bool(mode), mode, level, 1.15, 0.8, rejection, other, threshold
        )
        wanted = expected(settings)
        found = correct(trainer, engine, sequences(), settings)
        np.testing.assert_allclose(found.weights.numpy(), wanted, rtol=1e-12)
        if mode:
            assert len(set(wanted.round(9))) > 1, "the case must exercise the bounds"
    place = torch.arange(14) % 3

    def work(rank: int, reduce: Reduce) -> torch.Tensor:
        chosen = (place == rank).nonzero()[:, 0]
        owners = sequences(reduce, chosen)
        return correct(trainer[chosen], engine[chosen], owners, settings).weights

    for rank, part in enumerate(on_ranks(3, work)):
        np.testing.assert_allclose(part.numpy(), wanted[rank::3], rtol=1e-12)


def test_reports_say_how_much_was_changed() -> None:
    trainer, engine = tokens()
    settings = CorrectionSettings(True, upper=1.15, rejection="k2", rejection_level="token")
    terms = correct(trainer, engine, sequences(), settings).terms
    found = means(terms)
    d = (trainer - engine).numpy()
    assert found == {
        "correction/bounded_fraction": pytest.approx((np.exp(d) > 1.15).mean()),
        "correction/rejected_fraction": pytest.approx((d**2 / 2 > 0.1).mean()),
        "correction/weight": pytest.approx(expected(settings).mean()),
    }
    assert 0 < found["correction/rejected_fraction"] < found["correction/bounded_fraction"]


def test_a_log_prob_that_is_not_a_number_is_rejected() -> None:
    trainer, engine = tokens()
    trainer[2] = math.nan
    rejecting = CorrectionSettings(rejection="k3", rejection_level="token", rejection_threshold=1e9)
    weights = correct(trainer, engine, sequences(), rejecting).weights
    assert weights.tolist() == [float(i != 2) for i in range(14)]


def loss_inputs(old: torch.Tensor | None) -> LossInputs:
    trainer, engine = tokens()
    logprobs = trainer.clone().requires_grad_()
    advantages = torch.linspace(-1, 1, 14, dtype=torch.float64)
    return LossInputs(
        logprobs, torch.zeros_like(engine), old, engine, None, advantages,
        Sequences(OWNERS, COUNTS.double()),
    )  # fmt: skip


@pytest.mark.parametrize("on_policy", [True, False])
def test_weights_multiply_the_policy_loss_alone(on_policy: bool) -> None:
    """They compare the engine with the old log-probs, and stay in the denominator."""
    trainer, _ = tokens()
    inputs = loss_inputs(None if on_policy else trainer)
    inputs = replace(inputs, ref_logprobs=trainer + 0.1)
    correction = CorrectionSettings(True, "mask", "token", 1.15, 0.8)
    settings = LossSettings(kl_beta=0.5, kl_estimator="k2", correction=correction)
    loss = policy_loss(inputs, settings, Denominators(14, 4)).loss
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs)
    weighted = expected(correction) * inputs.advantages.numpy()
    np.testing.assert_allclose(
        gradient.numpy(), (-weighted + 0.5 * -0.1) / 14, rtol=1e-9, atol=1e-12
    )


def test_mismatch_terms() -> None:
    """k3 of KL(engine || trainer): exp(d) - d - 1 with d = log p(trainer) - log p(engine)."""
    terms = mismatch_terms(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0]))
    worst = terms["mismatch/max_abs_logprob"]
    assert isinstance(worst, MaxTerm) and float(worst.value) == 0.5
    found = means(terms)
    assert found == {
        "mismatch/mean_abs_logprob": 0.25,
        "mismatch/k1": -0.25,
        "mismatch/k3": pytest.approx((math.exp(0.5) - 1.5) / 2),
        "mismatch/chi2": pytest.approx((math.e - 1) / 2),
        "mismatch/ratio": pytest.approx((math.exp(0.5) + 1) / 2),
        "mismatch/trainer_nll": 1.5,
        "mismatch/engine_nll": 1.75,
    }
    derived = derived_mismatch(found)
    square = (math.e + 1) / 2
    assert derived == {
        "mismatch/ess": pytest.approx(found["mismatch/ratio"] ** 2 / square),
        "mismatch/trainer_ppl": pytest.approx(math.exp(1.5)),
        "mismatch/engine_ppl": pytest.approx(math.exp(1.75)),
    }
    with Waits() as waits:  # tokens that others sampled count for nothing, infinite ones as well
        masked = mismatch_terms(
            torch.tensor([-math.inf, -1.0, -9.0, -2.0]),
            torch.tensor([-0.5, -1.5, -1.0, -2.0]),
            torch.tensor([False, True, False, True]),
        )
    assert waits.found == {} and means(masked) == found
    of_two = masked["mismatch/max_abs_logprob"]
    assert isinstance(of_two, MaxTerm) and float(of_two.value) == 0.5
    empty = mismatch_terms(torch.zeros(0), torch.zeros(0))["mismatch/max_abs_logprob"]
    assert isinstance(empty, MaxTerm) and float(empty.value) == -math.inf
    assert derived_mismatch({"mismatch/chi2": math.nan}) == {}
