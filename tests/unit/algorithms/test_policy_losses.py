"""Every policy loss and aggregation against closed forms in fp64, in any layout."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import pytest
import torch
from support.loss_oracle import LOSSES, Sequence1, loss_and_gradient
from support.shared_sums import Reduce, means, on_ranks

from mindspeed_rl.algorithms.aggregation import AGGREGATIONS
from mindspeed_rl.algorithms.losses import LossSettings, policy_loss
from mindspeed_rl.algorithms.policy_losses import POLICY_LOSSES, SurrogateSettings
from mindspeed_rl.algorithms.types import (
    Denominators,
    LossInputs,
    LossOutputs,
    MeanTerm,
    Sequences,
)

LENGTHS = (5, 1, 0, 7, 3)  # one sequence has no trained token
LONGEST = 16
SURROGATE = SurrogateSettings(eps_lower=0.2, eps_upper=0.28)
BASE = LossSettings(surrogate=SURROGATE, longest=LONGEST)


@dataclass(frozen=True)
class Step:
    """All tokens of a step, one sequence after the other."""

    sequences: list[Sequence1]

    def flat(self, name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(s, name) for s in self.sequences]))

    @property
    def counts(self) -> list[int]:
        return [s.now.size for s in self.sequences]

    @property
    def owner(self) -> torch.Tensor:
        return torch.repeat_interleave(torch.tensor(self.counts))


def make_step(seed: int = 0, spread: float = 0.4) -> Step:
    generator = np.random.default_rng(seed)
    rows = []
    for i, length in enumerate(LENGTHS):
        old = -generator.uniform(0.05, 3.0, length)
        now = np.minimum(old + spread * generator.standard_normal(length), -0.01)
        advantage = np.full(length, (-1) ** i * (0.2 + generator.random()))
        rows.append(Sequence1(now, old, advantage, generator.random(length) < 0.3))
    return Step(rows)


def share(
    step: Step, chosen: torch.Tensor, logprobs: torch.Tensor, reduce: Reduce | None = None
) -> LossInputs:
    """The tokens ``chosen`` of a step; the sequences are numbered as in the step."""
    counts = torch.tensor(step.counts, dtype=torch.float64)
    of_token = step.owner[chosen]
    sequences = Sequences(of_token, counts, reduce) if reduce else Sequences(of_token, counts)
    now = logprobs[chosen]
    old = step.flat("old")[chosen]
    return LossInputs(
        logprobs=now,
        entropy=torch.full_like(now, 0.7),
        old_logprobs=old,
        rollout_logprobs=old,
        ref_logprobs=None,
        advantages=step.flat("advantage")[chosen],
        sequences=sequences,
        covariance_mask=step.flat("selected")[chosen],
    )


def denominators(step: Step) -> Denominators:
    return Denominators.of(step.counts)


def value_and_gradient(step: Step, settings: LossSettings) -> tuple[LossOutputs, torch.Tensor]:
    logprobs = step.flat("now").requires_grad_()
    inputs = share(step, torch.arange(logprobs.numel()), logprobs)
    outputs = policy_loss(inputs, settings, denominators(step))
    return outputs, torch.autograd.grad(outputs.loss, logprobs)[0]


def test_every_loss_has_a_closed_form() -> None:
    assert set(POLICY_LOSSES) == set(LOSSES)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_value_and_gradient_are_those_of_the_source(name: str, mode: str, seed: int) -> None:
    step = make_step(seed)
    outputs, gradient = value_and_gradient(step, replace(BASE, policy_loss=name, aggregation=mode))
    value, slopes = loss_and_gradient(name, step.sequences, SURROGATE, mode, LONGEST)
    assert float(outputs.loss) == pytest.approx(value, rel=1e-12, abs=1e-14)
    np.testing.assert_allclose(gradient.numpy(), np.concatenate(slopes), rtol=1e-7, atol=1e-9)
    assert means(outputs.terms)["loss/policy"] == pytest.approx(value, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("name", ["ppo", "clip_cov"])
def test_dual_clip(name: str) -> None:
    """A bad sample that became far more probable has a bounded loss and no gradient."""
    step = make_step(2, spread=2.0)
    dual = replace(SURROGATE, clip_ratio_c=1.5)
    settings = replace(BASE, policy_loss=name, surrogate=dual)
    outputs, gradient = value_and_gradient(step, settings)
    value, slopes = loss_and_gradient(name, step.sequences, dual, "token-mean", LONGEST)
    assert float(outputs.loss) == pytest.approx(value, rel=1e-12)
    np.testing.assert_allclose(gradient.numpy(), np.concatenate(slopes), rtol=1e-7, atol=1e-9)
    undone = value_and_gradient(step, replace(BASE, policy_loss=name))[0]
    assert float(undone.loss) > value + 0.01, "the bound must act somewhere"


@pytest.mark.parametrize(
    ("setting", "value", "name"),
    [
        ("ratio_cap", 1.1, "dppo_tv"),
        ("ratio_cap", 1.1, "dppo_kl"),
        ("sapo_tau_pos", 2.0, "sapo"),
        ("sapo_tau_neg", 3.0, "sapo"),
        ("dro_beta", 0.7, "dro"),
        ("kl_cov_coef", 0.3, "kl_cov"),
        ("eps_lower", 0.01, "gspo"),
        ("eps_upper", 0.01, "geo_mean"),
    ],
)
def test_settings_are_read(setting: str, value: float, name: str) -> None:
    step = make_step(3)
    changed = replace(SURROGATE, **{setting: value})
    settings = replace(BASE, policy_loss=name, surrogate=changed)
    wanted, _ = loss_and_gradient(name, step.sequences, changed, "token-mean", LONGEST)
    before, _ = loss_and_gradient(name, step.sequences, SURROGATE, "token-mean", LONGEST)
    found = float(value_and_gradient(step, settings)[0].loss)
    assert found == pytest.approx(wanted, rel=1e-12)
    assert abs(wanted - before) > 1e-6


# --- layouts -----------------------------------------------------------------------------------


def split_by_sequence(step: Step) -> list[torch.Tensor]:
    """Micro-batches of two sequences, one, none, and two."""
    groups = ((0, 1), (2,), (), (3, 4))
    return [torch.isin(step.owner, torch.tensor(g)).nonzero()[:, 0] for g in groups]


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_micro_batches_add_up_to_the_batch(name: str, mode: str) -> None:
    """Denominators are of the step, not of a micro-batch."""
    step, settings = make_step(), replace(BASE, policy_loss=name, aggregation=mode)
    whole, wanted = value_and_gradient(step, settings)
    logprobs = step.flat("now").requires_grad_()
    parts = [
        policy_loss(share(step, chosen, logprobs), settings, denominators(step))
        for chosen in split_by_sequence(step)
    ]
    total = torch.stack([p.loss for p in parts]).sum()
    torch.testing.assert_close(total, whole.loss)
    torch.testing.assert_close(torch.autograd.grad(total, logprobs)[0], wanted)
    for metric, mean in means(whole.terms).items():
        terms = [cast(MeanTerm, p.terms[metric]) for p in parts]
        found = sum(t.sum for t in terms) / sum(t.weight for t in terms)
        assert float(found) == pytest.approx(mean, rel=1e-12, abs=1e-15), metric


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_context_parallel_ranks_add_up_to_the_batch(name: str) -> None:
    """Tokens of a sequence on several ranks, and ranks without any of some sequence."""
    mode = "seq-mean-token-mean"
    step, settings = make_step(), replace(BASE, policy_loss=name, aggregation=mode)
    whole, wanted = value_and_gradient(step, settings)
    generator = torch.Generator().manual_seed(1)
    place = torch.randint(0, 3, (len(step.owner),), generator=generator)

    def work(rank: int, reduce: Reduce) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = step.flat("now").requires_grad_()
        inputs = share(step, (place == rank).nonzero()[:, 0], logprobs, reduce)
        loss = policy_loss(inputs, settings, denominators(step)).loss
        return loss.detach(), torch.autograd.grad(loss, logprobs)[0]

    parts = on_ranks(3, work)
    torch.testing.assert_close(torch.stack([p[0] for p in parts]).sum(), whole.loss.detach())
    torch.testing.assert_close(torch.stack([p[1] for p in parts]).sum(0), wanted)


# --- edges -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_nothing_trained_is_nothing_lost(name: str, mode: str, dtype: torch.dtype) -> None:
    """A micro-batch of fully masked sequences, and a step of them."""
    none = torch.zeros(0, dtype=dtype)
    logprobs = none.clone().requires_grad_()
    owners = Sequences(torch.zeros(0, dtype=torch.int64), torch.zeros(2, dtype=dtype))
    inputs = LossInputs(logprobs, none, none, none, None, none, owners, none.bool())
    for counts in (Denominators(10, 3), Denominators(0, 0)):
        outputs = policy_loss(inputs, replace(BASE, policy_loss=name, aggregation=mode), counts)
        assert float(outputs.loss) == 0.0
        assert torch.autograd.grad(outputs.loss, logprobs)[0].numel() == 0


@pytest.mark.parametrize("nats", [30.0, -30.0, 300.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_ratios_of_e_to_the_30_stay_finite(name: str, advantage: float, nats: float) -> None:
    old = torch.tensor([-0.5 - max(0.0, nats), -1.0])
    logprobs = (old + torch.tensor([nats, 0.1])).requires_grad_()
    sequences = Sequences(torch.tensor([0, 1]), torch.ones(2))
    inputs = LossInputs(
        logprobs, torch.zeros(2), old, old, None, torch.full((2,), advantage), sequences,
        torch.tensor([True, False]),
    )  # fmt: skip
    outputs = policy_loss(inputs, replace(BASE, policy_loss=name), Denominators(2, 2))
    (gradient,) = torch.autograd.grad(outputs.loss, logprobs)
    assert math.isfinite(outputs.loss) and gradient.isfinite().all()
    assert all(
        bool(torch.as_tensor(getattr(t, "sum", getattr(t, "value", 0.0))).isfinite())
        for t in outputs.terms.values()
    )


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_on_policy_gradient_is_that_of_reinforce(name: str) -> None:
    """At ratio 1 every loss has the slope -A: they differ in what comes after."""
    step = make_step()
    settings = replace(BASE, policy_loss=name)
    logprobs = step.flat("now").requires_grad_()
    inputs = share(step, torch.arange(logprobs.numel()), logprobs)
    inputs = replace(
        inputs, old_logprobs=None, covariance_mask=torch.zeros_like(inputs.covariance_mask)
    )
    outputs = policy_loss(inputs, settings, denominators(step))
    (gradient,) = torch.autograd.grad(outputs.loss, logprobs)
    torch.testing.assert_close(gradient, -step.flat("advantage") / len(gradient))
    assert float(outputs.terms["policy/ratio_max_deviation"].value) == 0.0
    assert means(outputs.terms)["policy/clip_fraction"] == 0.0
