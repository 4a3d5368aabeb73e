"""Advantages against independent formulas; degenerate groups; whitening."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
import pytest
import torch
from support.shared_sums import Reduce, alone, on_ranks
from support.waits import Waits
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_rl.algorithms.advantages import ESTIMATORS, AdvantageSettings, GroupRewards, teaches
from mindspeed_rl.algorithms.token_advantages import (
    discounted_sums,
    generalized_advantages,
    rewards_to_tokens,
    whitened,
)

NAN = float("nan")
RELATIVE = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "gpg", "opo")


def step_of(
    rows: list[list[float]],
    lengths: list[list[int]] | None = None,
    greedy: list[float] | None = None,
    dtype: torch.dtype = torch.float64,
) -> GroupRewards:
    rewards = torch.tensor(rows, dtype=dtype)
    tokens = torch.tensor(lengths) if lengths else torch.ones_like(rewards, dtype=torch.int64)
    return GroupRewards(rewards, tokens, None if greedy is None else torch.tensor(greedy).to(dtype))


def values_of(name: str, step: GroupRewards) -> torch.Tensor:
    return ESTIMATORS[name].formula(step, AdvantageSettings())


def expected(name: str, rows: list[list[float]], lengths: list[list[int]]) -> list[list[float]]:
    """One group after the other, with the statistics module."""
    known = [[r for r in row if not math.isnan(r)] for row in rows]
    same = [len(k) < 2 or statistics.stdev(k) < 1e-4 for k in known]
    result = []
    for row, tokens, values, degenerate in zip(rows, lengths, known, same, strict=True):
        new = []
        for r in row:
            if math.isnan(r) or degenerate:
                new.append(0.0)
                continue
            mean = statistics.fmean(values)
            if name == "grpo":
                new.append((r - mean) / (statistics.stdev(values) + 1e-4))
            elif name == "rloo":
                new.append(r - (sum(values) - r) / (len(values) - 1))
            elif name == "gpg":
                new.append((r - mean) * len(rows) / max(1, same.count(False)))
            elif name == "opo":
                weights = [t for t, x in zip(tokens, row, strict=True) if not math.isnan(x)]
                new.append(r - np.average(values, weights=weights))
            else:
                assert name in ("dr_grpo", "reinforce_plus_plus_baseline")
                new.append(r - mean)
        result.append(new)
    return result


@pytest.mark.parametrize("name", RELATIVE)
def test_relative_advantages_are_those_of_the_source(name: str) -> None:
    rows = [[1.0, 0.0, 0.0, 1.0], [0.3, -2.0, 7.0, NAN], [5.0, 5.0, 5.0, 5.0], [NAN, 1.0, NAN, NAN]]
    lengths = [[3, 9, 1, 4], [2, 2, 8, 5], [1, 2, 3, 4], [4, 3, 2, 1]]
    found = values_of(name, step_of(rows, lengths))
    np.testing.assert_allclose(found.numpy(), expected(name, rows, lengths), rtol=1e-12, atol=1e-15)


def test_remax_subtracts_the_greedy_reward() -> None:
    rows = [[1.0, 0.0], [0.5, NAN], [1.0, 2.0]]
    found = values_of("remax", step_of(rows, greedy=[0.25, 1.0, NAN]))
    assert found.tolist() == [[0.75, -0.25], [-0.5, 0.0], [0.0, 0.0]]


def test_plain_rewards_and_abstentions() -> None:
    found = values_of("reinforce_plus_plus", step_of([[1.5], [NAN]]))
    assert found.tolist() == [[1.5], [0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "rewards",
    [
        [0.1, 0.1, 0.1],  # whose mean in fp32 is not 0.1
        [0.1 + 0.2, 0.3, 0.3],
        [1e6, 1e6, 1e6],
        [12345.7] * 16,  # whose mean in fp32 is another number
        [3.0],
        [0.7, NAN, NAN],
        [NAN, NAN, NAN],
        [-0.0, 0.0, 0.0],
    ],
)
@pytest.mark.parametrize("name", RELATIVE)
def test_degenerate_groups_teach_nothing(
    name: str, rewards: list[float], dtype: torch.dtype
) -> None:
    """Exactly 0, not rounding divided by rounding."""
    step = step_of([rewards], [[5, 1, 9, *range(1, 14)][: len(rewards)]], dtype=dtype)
    assert values_of(name, step).tolist() == [[0.0] * len(rewards)]
    assert not teaches(step.rewards).any() and ESTIMATORS[name].min_group_size == 2


@pytest.mark.parametrize("name", RELATIVE)
def test_a_large_common_reward_does_not_cancel(name: str) -> None:
    """Two passes: in fp32 the squares of 1e6 have no digits left for a difference of 2."""
    large = values_of(name, step_of([[1e6 + 1, 1e6 - 1]], [[1, 3]], dtype=torch.float32))
    small = values_of(name, step_of([[1.0, -1.0]], [[1, 3]], dtype=torch.float32))
    torch.testing.assert_close(large, small)


# --- tokens ------------------------------------------------------------------------------------

LENGTHS = [3, 0, 1, 5]


def rows_of(values: torch.Tensor, lengths: list[int]) -> list[np.ndarray]:
    return [part.numpy() for part in values.split(lengths)]


@pytest.mark.parametrize("discount", [1.0, 0.9, 0.0])
def test_discounted_sums(discount: float) -> None:
    values = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted = [
        sum(discount ** (k - t) * row[k] for k in range(t, len(row)))
        for row in rows_of(values, LENGTHS)
        for t in range(len(row))
    ]
    found = discounted_sums(values, LENGTHS, discount)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-12)
    assert discounted_sums(values[:0], [], discount).numel() == 0
    assert discounted_sums(values[:0], [0, 0], discount).numel() == 0


LONG = [1, 127, 128, 0, 129, 300, 128 * 128 + 5]


@pytest.mark.parametrize("discount", [1.0, 0.9999, 0.95, 0.3, 0.0])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_long_sums_are_those_of_the_recursion(
    discount: float, dtype: torch.dtype, limit: float
) -> None:
    """Blocks, blocks of blocks, and lengths beside the border of a block."""
    values = torch.randn(sum(LONG), generator=torch.Generator().manual_seed(3)).to(dtype)
    wanted = []
    for row in rows_of(values.double(), LONG):
        total, sums = 0.0, []
        for value in row[::-1].tolist():
            total = value + discount * total
            sums.append(total)
        wanted += sums[::-1]
    exact = np.array(wanted)
    found = discounted_sums(values, LONG, discount)
    assert found.dtype is dtype
    assert np.abs(found.numpy() - exact).max() <= limit * np.abs(exact).max()


def test_sums_need_no_operation_per_token() -> None:
    """Twenty times as many tokens take a few operations more, not twenty times as many."""
    counts = []
    for length in (1000, 20_000):
        with CountedOperations() as counted:
            discounted_sums(torch.ones(2 * length), [length, length], 0.95)
        counts.append(counted.number)
    assert counts[1] < counts[0] + 40 and counts[1] < 150


class CountedOperations(TorchDispatchMode):
    """Counts the operations that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def test_a_reward_is_at_the_last_token() -> None:
    tokens = rewards_to_tokens(torch.tensor([1.0, 2.0, 3.0, 4.0]), LENGTHS)
    assert tokens.tolist() == [0, 0, 1, 3, 0, 0, 0, 0, 4]
    assert rewards_to_tokens(torch.zeros(0), []).numel() == 0


@pytest.mark.parametrize(("discount", "trace"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_generalized_advantages(discount: float, trace: float) -> None:
    """The sum over all n-step errors, sequence by sequence."""
    generator = torch.Generator().manual_seed(1)
    rewards, values = torch.randn(2, 9, dtype=torch.float64, generator=generator)
    wanted = []
    for r, v in zip(rows_of(rewards, LENGTHS), rows_of(values, LENGTHS), strict=True):
        after = np.append(v[1:], 0.0)
        errors = r + discount * after - v if len(v) else r
        wanted += [
            sum((discount * trace) ** (k - t) * errors[k] for k in range(t, len(r)))
            for t in range(len(r))
        ]
    found = generalized_advantages(rewards, values, LENGTHS, discount=discount, trace_decay=trace)
    np.testing.assert_allclose(found.advantages.numpy(), wanted, rtol=1e-12)
    torch.testing.assert_close(found.returns, found.advantages + values)
    if trace == 1.0:
        np.testing.assert_allclose(
            found.returns.numpy(), discounted_sums(rewards, LENGTHS, discount).numpy(), rtol=1e-9
        )


def test_the_host_waits_for_no_token() -> None:
    """Neither to place rewards nor to whiten what a mask leaves, which may be NaN elsewhere."""
    rewards, counted = torch.arange(1.0, len(LENGTHS) + 1), torch.arange(9) % 4 != 0
    with Waits() as waits:
        tokens = rewards_to_tokens(rewards, LENGTHS)
        whitened([tokens.masked_fill(~counted, NAN)], [counted], alone)
    assert waits.found == {}


def test_whitening_is_over_all_counted_tokens_of_all_ranks() -> None:
    """Micro-batches and ranks do not show; an abstained token is in no statistic."""
    values = torch.randn(20, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) + 5
    counted = torch.arange(20) % 5 != 0
    kept = values[counted].tolist()
    wanted = (values - statistics.fmean(kept)) / statistics.stdev(kept)
    wanted[~counted] = 0.0
    (whole,) = whitened([values], [counted], alone)
    torch.testing.assert_close(whole, wanted)

    def work(rank: int, reduce: Reduce) -> list[torch.Tensor]:
        mine, mask = values[rank::2], counted[rank::2]
        return whitened([mine[:3], mine[3:3], mine[3:]], [mask[:3], mask[3:3], mask[3:]], reduce)

    for rank, parts in enumerate(on_ranks(2, work)):
        torch.testing.assert_close(torch.cat(parts), wanted[rank::2])


@pytest.mark.parametrize("values", [[0.1, 0.1, 0.1], [3.0], [], [1e6, 1e6]])
def test_whitening_of_what_does_not_vary(values: list[float]) -> None:
    part = torch.tensor(values)
    (found,) = whitened([part], [torch.ones_like(part, dtype=torch.bool)], alone)
    assert found.tolist() == [0.0] * len(values)
