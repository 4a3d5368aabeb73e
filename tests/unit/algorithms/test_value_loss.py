"""The loss of a critic against closed forms in fp64, and how well it foretells returns."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support.shared_sums import Reduce, alone, means, on_ranks

from mindspeed_rl.algorithms.types import Denominators, Sequences, ValueInputs
from mindspeed_rl.algorithms.value_loss import explained_variance, value_loss

LENGTHS = (3, 2, 0, 1)
OWNERS = [i for i, n in enumerate(LENGTHS) for _ in range(n)]
# within the clip, outside and away from the target, outside and towards it, no target, exact
VALUES = [0.3, 1.4, -0.9, 0.2, 0.7, 2.0]
OLD = [0.2, 0.5, -0.1, 0.9, 0.7, 2.4]
RETURNS = [1.0, 0.0, -2.0, math.nan, 0.7, 0.0]
CLIP = 0.5


def inputs(indices: list[int]) -> ValueInputs:
    """Some tokens of the step as a micro-batch of its own."""
    values = torch.tensor([VALUES[i] for i in indices], dtype=torch.float64, requires_grad=True)
    rest = [torch.tensor([x[i] for i in indices], dtype=torch.float64) for x in (OLD, RETURNS)]
    owners = torch.tensor([OWNERS[i] for i in indices])
    return ValueInputs(values, *rest, Sequences(owners, torch.tensor(LENGTHS, dtype=torch.float64)))


def by_hand(clip: float, mode: str, i: int) -> tuple[float, float]:
    """Loss of a token and its derivative."""
    v, old, target = VALUES[i], OLD[i], RETURNS[i]
    if math.isnan(target):
        return 0.0, 0.0
    weight = {"token-mean": 1 / 6, "seq-mean-token-mean": 1 / 3 / LENGTHS[OWNERS[i]]}[mode]
    plain = (v - target) ** 2
    held = (float(np.clip(v, old - clip, old + clip)) - target) ** 2 if clip else -1.0
    slope = 0.0 if held > plain else 2 * (v - target)
    return weight * max(plain, held) / 2, weight * slope / 2


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("clip", [CLIP, 0.0])
@pytest.mark.parametrize("cut", [[range(6)], [range(2), range(2, 6)], [[i] for i in range(6)]])
def test_value_and_gradient(clip: float, mode: str, cut: list[list[int]]) -> None:
    """Also of any cut into micro-batches: the denominators are those of the step."""
    loss, slopes = 0.0, []
    for part in cut:
        given = inputs(list(part))
        found = value_loss(given, Denominators.of(LENGTHS), clip=clip, aggregation=mode)
        (slope,) = torch.autograd.grad(found.loss, given.values)
        loss += float(found.loss)
        slopes += slope.tolist()
    expected = [by_hand(clip, mode, i) for i in range(6)]
    assert loss == pytest.approx(sum(e[0] for e in expected), rel=1e-12)
    assert slopes == pytest.approx([e[1] for e in expected], rel=1e-12, abs=1e-15)
    assert sum(s == 0 for s in slopes) == (3 if clip else 2), "the clip must act"


def test_metrics_are_means_over_tokens_with_a_target() -> None:
    found = value_loss(inputs(list(range(6))), Denominators.of(LENGTHS), clip=CLIP)
    known = [i for i in range(6) if i != 3]
    assert means(found.terms) == pytest.approx(
        {
            "value/loss": float(found.loss),
            "value/clip_fraction": 1 / 5,
            "value/mean": np.mean([VALUES[i] for i in known]),
            "value/return_mean": np.mean([RETURNS[i] for i in known]),
        }
    )


def test_nothing_to_learn_from_is_0() -> None:
    found = value_loss(inputs([]), Denominators(0, 0), clip=CLIP)
    assert float(found.loss) == 0.0


@pytest.mark.parametrize("cut", [[range(6)], [range(1), range(1, 6)]])
def test_explained_variance(cut: list[range]) -> None:
    returns = [torch.tensor([RETURNS[i] for i in part]) for part in cut]
    values = [torch.tensor([VALUES[i] for i in part]) for part in cut]
    found = explained_variance(returns, values, alone)
    known = [i for i in range(6) if i != 3]
    target = np.array([RETURNS[i] for i in known])
    error = target - np.array([VALUES[i] for i in known])
    assert found == pytest.approx(1 - error.var() / target.var(), rel=1e-5)


def test_explained_variance_of_equal_returns_is_0() -> None:
    assert explained_variance([torch.ones(3)], [torch.arange(3.0)], alone) == 0.0


def test_explained_variance_is_over_all_ranks() -> None:
    """Each of two ranks has half of the tokens; the sums of both are in the answer."""
    returns, values = torch.tensor([1.0, 3.0, 2.0, 6.0]), torch.tensor([1.0, 2.0, 2.0, 4.0])
    whole = explained_variance([returns], [values], alone)

    def work(rank: int, reduce: Reduce) -> float:
        half = slice(2 * rank, 2 * rank + 2)
        return explained_variance([returns[half]], [values[half]], reduce)

    assert on_ranks(2, work) == pytest.approx([whole] * 2, rel=1e-6)
