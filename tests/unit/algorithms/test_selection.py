"""Tokens selected over the whole optimizer step do not depend on how it is cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.shared_sums import Reduce, alone, on_ranks

from mindspeed_rl.algorithms.policy_losses import Selection, SurrogateSettings
from mindspeed_rl.algorithms.selection import (
    StepTokens,
    largest_keys,
    select_by_covariance,
)

NUM = 400
SETTINGS = SurrogateSettings(cov_ratio=0.05, clip_cov_lower=0.1, clip_cov_upper=2.0)


def select(
    step: StepTokens,
    selection: Selection,
    reduce: Reduce = alone,
    settings: SurrogateSettings = SETTINGS,
    seed: int = 7,
) -> list[torch.Tensor]:
    return select_by_covariance(step, selection, settings, seed, reduce)


def columns() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "logprobs": -3 * torch.rand(NUM, generator=generator),
        "log_ratio": 0.3 * torch.randn(NUM, generator=generator),
        "advantages": torch.randn(NUM, generator=generator),
        "sample_ids": torch.arange(NUM) // 10,
        "places": torch.arange(NUM) % 10,
    }


def tokens(*parts: torch.Tensor) -> StepTokens:
    return StepTokens(**{name: [c[part] for part in parts] for name, c in columns().items()})


def covariances() -> np.ndarray:
    logp, a = (columns()[n].double().numpy() for n in ("logprobs", "advantages"))
    return (logp - logp.mean()) * (a - a.mean())


def test_the_largest_covariances_are_selected() -> None:
    (found,) = select(tokens(torch.arange(NUM)), "largest")
    assert set(found.nonzero()[:, 0].tolist()) == set(np.argsort(covariances())[-20:].tolist())


def test_random_ones_are_within_the_bounds_and_not_clipped_anyway() -> None:
    (found,) = select(tokens(torch.arange(NUM)), "random")
    ratio, a = columns()["log_ratio"].exp().numpy(), columns()["advantages"].numpy()
    clipped = ((ratio > 1.2) & (a > 0)) | ((ratio < 0.8) & (a < 0))
    allowed = (covariances() > 0.1) & (covariances() < 2.0) & ~clipped
    assert found.sum() == 20 < allowed.sum()
    assert allowed[found.numpy()].all()
    (other,) = select(tokens(torch.arange(NUM)), "random", seed=8)
    assert not torch.equal(found, other)
    narrow = replace(SETTINGS, clip_cov_lower=1.9)
    (few,) = select(tokens(torch.arange(NUM)), "random", settings=narrow)
    inside = (covariances() > 1.9) & (covariances() < 2.0) & ~clipped
    assert few.tolist() == inside.tolist() and inside.sum() < 20


@pytest.mark.parametrize("choice", ["largest", "random"])
def test_any_cut_selects_the_same_tokens(choice: Selection) -> None:
    (whole,) = select(tokens(torch.arange(NUM)), choice)
    generator = torch.Generator().manual_seed(1)
    place = torch.randint(0, 9, (NUM,), generator=generator)  # 3 ranks x 3 micro-batches
    place[place == 8] = 0  # one of them is empty

    def work(rank: int, reduce: Reduce) -> list[torch.Tensor]:
        parts = [(place == 3 * rank + i).nonzero()[:, 0] for i in range(3)]
        return select(tokens(*parts), choice, reduce)

    for rank, parts in enumerate(on_ranks(3, work)):
        for i, part in enumerate(parts):
            assert torch.equal(part, whole[place == 3 * rank + i])


def test_at_least_one_token_is_selected() -> None:
    (found,) = select(
        tokens(torch.arange(NUM)), "largest", settings=replace(SETTINGS, cov_ratio=0.0)
    )
    assert found.sum() == 1 and found[covariances().argmax()]


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=60, unique=True),
    st.integers(1, 30),
    st.integers(0, 60),
)
@settings(deadline=None, max_examples=200)
def test_largest_keys_are_those_of_a_sort(keys: list[int], number: int, num_barred: int) -> None:
    allowed = torch.arange(len(keys)) >= num_barred
    (found,) = largest_keys([torch.tensor(keys, dtype=torch.int64)], [allowed], number, alone)
    wanted = sorted(keys[num_barred:], reverse=True)[:number]
    chosen = [k for k, f in zip(keys, found.tolist(), strict=True) if f]
    assert sorted(chosen, reverse=True) == wanted


def test_equal_covariances_are_told_apart_by_their_place() -> None:
    """A step of equal tokens: exactly as many as asked for, the same in any order."""
    table = columns()
    table["logprobs"], table["advantages"] = torch.full((NUM,), -1.0), torch.zeros(NUM)

    def chosen(order: torch.Tensor) -> set[int]:
        step = StepTokens(**{name: [c[order]] for name, c in table.items()})
        (found,) = select(step, "largest")
        return set(order[found].tolist())

    assert len(chosen(torch.arange(NUM))) == 20
    assert chosen(torch.arange(NUM)) == chosen(torch.arange(NUM).flip(0))
