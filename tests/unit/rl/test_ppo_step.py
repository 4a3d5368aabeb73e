"""A PPO step number by number: values, their targets, updates of the critic.

Policy and critic are tables: see ``test_rl_step``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from support.rl_run import COUNTS, REWARDS, TableCritic, TableRun, by_sample, make_run, value
from support.table_engine import VOCAB, response_of

from mindspeed_rl.core.memory import CRITIC_OWNERS
from mindspeed_rl.metrics.metric_set import MetricSet
from mindspeed_rl.rl.batches import StepBatches
from mindspeed_rl.samples.store import PlacedSamples

GAE = "--rl-advantage-estimator gae --gae-lambda 0.5 --rl-gamma 0.9 "
TABLE = torch.linspace(-0.5, 0.8, VOCAB)


def make(folder: Path, flags: str = "", rewards: dict[int, float | None] | None = None) -> TableRun:
    """A run whose critic says ``TABLE`` before each token."""
    run = make_run(folder, GAE + flags, rewards or REWARDS)
    run.set_models(critic=TableCritic(TABLE))
    return run


def by_hand(rewards: dict[int, float | None]) -> tuple[list[list[float]], list[list[float]]]:
    """Advantages before whitening and returns, from the definition, token by token."""
    every, returns = [], []
    for i in range(6):
        values = [float(TABLE[t]) for t in response_of(i)] + [0.0]
        last, row = 0.0, [0.0] * COUNTS[i]
        for t in range(COUNTS[i] - 1, -1, -1):
            reward = (rewards[i] or 0.0) if t == COUNTS[i] - 1 else 0.0
            error = reward + 0.9 * values[t + 1] - values[t]
            last = row[t] = error + 0.9 * 0.5 * last
        every.append(row)
        returns.append([a + v for a, v in zip(row, values, strict=False)])
    return every, returns


def approx(rows: list[list[float]]) -> list[Any]:
    return [pytest.approx(row, rel=1e-4, abs=1e-6, nan_ok=True) for row in rows]


@pytest.mark.parametrize("flags", ["", "--global-batch-size 3", "--max-tokens-per-micro-batch 40"])
def test_advantages_and_returns_of_every_token(tmp_path: Path, flags: str) -> None:
    """One pass of the critic per optimizer step, over the policy's own micro-batches."""
    run = make(tmp_path, flags)
    batches = run.batches()
    every, returns = by_hand(REWARDS)
    flat = np.concatenate(every)
    white = [((np.array(row) - flat.mean()) / flat.std(ddof=1)).tolist() for row in every]
    assert by_sample(batches, "advantages") == approx(white)
    assert by_sample(batches, "returns") == approx(returns)
    assert run.critic.num_passes == len(batches.updates)


def test_a_sample_without_a_reward_has_no_target(tmp_path: Path) -> None:
    """Neither the policy nor the critic learns from it."""
    rewards = REWARDS | {2: None}
    batches = make(tmp_path, rewards=rewards).batches()
    every, returns = by_hand(rewards)
    flat = np.concatenate([row for i, row in enumerate(every) if i != 2])
    white = [((np.array(row) - flat.mean()) / flat.std(ddof=1)).tolist() for row in every]
    white[2], returns[2] = [0.0] * COUNTS[2], [float("nan")] * COUNTS[2]
    assert by_sample(batches, "advantages") == approx(white)
    assert by_sample(batches, "returns") == approx(returns)


def test_the_kl_of_each_token_is_a_reward(tmp_path: Path) -> None:
    flags = "--grpo-kl-beta 0.1 --rl-kl-in-reward --rl-kl-estimator k1"
    run = make(tmp_path, flags)
    run.reference.table = run.policy.table.detach() - 0.5
    plain = make(tmp_path).batches()
    with_kl = run.batches()
    # a penalty of 0.05 on every token, discounted as the errors are
    for i, (a, b) in enumerate(
        zip(by_sample(plain, "returns"), by_sample(with_kl, "returns"), strict=True)
    ):
        less = [0.05 * sum(0.45**k for k in range(COUNTS[i] - t)) for t in range(COUNTS[i])]
        assert [x - y for x, y in zip(a, b, strict=True)] == pytest.approx(less, rel=1e-4)


def test_critic_and_policy_are_updated(tmp_path: Path) -> None:
    """Two optimizer steps of three samples; the critic's gradient is (V - R) / tokens."""
    run = make(tmp_path, "--global-batch-size 3 --value-clip 0")
    batches = run.batches()
    metrics = run.update(batches)
    _, returns = by_hand(REWARDS)
    table, critic = TABLE.clone(), run.critic
    for step, samples in enumerate((range(3), range(3, 6))):
        gradient, count = torch.zeros(VOCAB), sum(COUNTS[i] for i in samples)
        for i in samples:
            for token, target in zip(response_of(i), returns[i], strict=True):
                gradient[token] += (float(table[token]) - target) / count
        torch.testing.assert_close(critic.gradients[step], gradient, rtol=1e-4, atol=1e-6)
        table -= gradient
    assert len(run.policy.gradients) == 2 == run.state.version
    values = np.concatenate([[float(TABLE[t]) for t in response_of(i)] for i in range(6)])
    targets = np.concatenate(returns)
    assert value(metrics, "value/explained_variance") == pytest.approx(
        1 - (targets - values).var() / targets.var(), rel=1e-4
    )
    assert value(metrics, "value/return_mean") == pytest.approx(targets.mean(), rel=1e-4)
    assert value(metrics, "optimizer/skipped") == 0.0


def test_a_critic_alone(tmp_path: Path) -> None:
    """--critic-warmup-steps: the policy keeps its weights and its version, nothing is skipped."""
    run = make(tmp_path, "--critic-warmup-steps 1")
    batches = run.batches()
    before = run.policy.table.detach().clone()
    metrics = run.update(batches)
    assert torch.equal(run.policy.table, before) and run.state.version == 0
    assert len(run.critic.gradients) == 1
    assert value(metrics, "optimizer/skipped") == 0.0 and value(metrics, "value/loss") > 0.0


def test_a_step_without_batches_leaves_the_critic(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.to_rollout()
    run.to_train()
    nowhere = PlacedSamples([], [], [], cast(Any, None), MetricSet())
    metrics = run.update(StepBatches([], nowhere))
    assert run.critic.gradients == []
    assert value(metrics, "optimizer/skipped") == 1.0
    assert "value/loss" in metrics and "value/lr" in metrics


def test_memory_of_the_critic_comes_for_its_use_alone(tmp_path: Path) -> None:
    """With ``--rl-offload all``: parameters for a pass, everything for its updates."""
    run = make(tmp_path)
    moves = run.moves_of(CRITIC_OWNERS)
    batches = run.batches()
    assert moves == ["critic here", "critic away"]
    moves.clear()
    run.update(batches)
    away = [f"{owner} away" for owner in reversed(CRITIC_OWNERS)]
    assert moves == [f"{owner} here" for owner in CRITIC_OWNERS] + away
