"""Every algorithm through the step of a run whose model is a table, number by number.

Sample ``i`` answers with 1 + i % 3 times token 4 + i, the odd ones with the stop token behind it;
two prompts, three samples each.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from support.rl_run import COUNTS, REWARDS, TablePolicy, by_sample, make_run, value
from support.table_engine import VOCAB, first_table, response_of

from mindspeed_rl.algorithms.advantages import ESTIMATORS, AdvantageSettings, GroupRewards
from mindspeed_rl.algorithms.policy_losses import POLICY_LOSSES
from mindspeed_rl.metrics.metric_set import MetricSet
from mindspeed_rl.rl.advantages import shaped_rewards
from mindspeed_rl.rl.rollouts import generate_rollouts
from mindspeed_rl.rl.update import select_tokens

NUM_TOKENS = sum(COUNTS)


def same_in_each(values: list[float]) -> list[Any]:
    return [pytest.approx([v] * n, rel=1e-5, abs=1e-7) for v, n in zip(values, COUNTS, strict=True)]


# --- advantages --------------------------------------------------------------------------------


def expected(name: str) -> list[float]:
    """Of each sample, by the estimator's formula; a critic says 0 everywhere."""
    estimator = ESTIMATORS[name]
    rewards = torch.tensor([cast(float, REWARDS[i]) for i in range(6)]).view(2, 3)
    # the greedy answers have the ids 0 and 1 of their own batch
    greedy = torch.tensor([REWARDS[0], REWARDS[1]])
    step = GroupRewards(rewards, torch.tensor(COUNTS).view(2, 3), greedy)
    values: list[float] = estimator.formula(step, AdvantageSettings()).flatten().tolist()
    if not estimator.whiten:
        return values
    tokens = [v for v, n in zip(values, COUNTS, strict=True) for _ in range(n)]
    return [(v - statistics.fmean(tokens)) / statistics.stdev(tokens) for v in values]


@pytest.mark.parametrize("per_update", [6, 3])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_reaches_its_tokens(tmp_path: Path, name: str, per_update: int) -> None:
    """Statistics are of the whole step, however many optimizer steps it has."""
    teacher = f" --teacher-hf-checkpoint {tmp_path}" if name == "none" else ""
    flags = f"--rl-advantage-estimator {name} --global-batch-size {per_update}{teacher}"
    run = make_run(tmp_path, flags, REWARDS)
    assert by_sample(run.batches(), "advantages") == same_in_each(expected(name))
    asked = run.engine.asked
    assert [(len(r), s.temperature) for r, s in asked[1:]] == ([(2, 0.0)] * (name == "remax"))


def test_remax_shapes_the_rewards_of_greedy_answers_as_all_others(tmp_path: Path) -> None:
    """One answer to each prompt; its reward has the penalty for length, as that of a sample."""
    flags = "--rl-advantage-estimator remax --rl-overlong-buffer 8 --rl-overlong-penalty 0.8"
    run = make_run(tmp_path, flags, REWARDS)
    run.to_rollout()
    run.state.step = 1
    rollouts = generate_rollouts(run.parts, run.state)
    prompts = [run.parts.data.train[rollouts.samples[i].prompt_index].text for i in (0, 3)]
    assert [r.prompt for r in run.pool.requests] == prompts
    # the greedy answers are as long as those of samples 0 and 1
    assert rollouts.greedy_rewards == shaped_rewards(run.config, rollouts.samples, 1)[:2]
    penalties = [0.8 * n / 8 for n in COUNTS[:2]]  # of a limit of 8 tokens
    assert rollouts.greedy_rewards == pytest.approx([1.0 - penalties[0], 0.0 - penalties[1]])


def test_discounted_returns_with_the_kl_in_the_reward(tmp_path: Path) -> None:
    """R_t = sum of gamma^k (reward at the end - beta KL), whitened over all tokens."""
    run = make_run(
        tmp_path,
        "--rl-advantage-estimator reinforce_plus_plus --rl-gamma 0.5 --grpo-kl-beta 0.1 "
        "--rl-kl-in-reward --rl-kl-estimator k1",
        REWARDS,
    )
    shift = torch.linspace(-0.5, 0.5, VOCAB)
    run.reference.table = first_table() - shift
    batches = run.batches()
    returns = []
    for i in range(6):
        tokens = [-0.1 * float(shift[t]) for t in response_of(i)]
        tokens[-1] += cast(float, REWARDS[i])
        n = len(tokens)
        returns.append([sum(0.5 ** (k - t) * tokens[k] for k in range(t, n)) for t in range(n)])
    flat = [r for row in returns for r in row]
    mean, std = statistics.fmean(flat), statistics.stdev(flat)
    wanted = [pytest.approx([(r - mean) / std for r in row], rel=1e-4) for row in returns]
    assert by_sample(batches, "advantages") == wanted
    kl = statistics.fmean(float(shift[t]) for i in range(6) for t in response_of(i))
    assert value(batches.metrics, "reward/kl") == pytest.approx(kl, rel=1e-5)


def test_the_kl_of_its_tokens_is_taken_from_the_reward_of_a_sample(tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        "--rl-advantage-estimator dr_grpo --grpo-kl-beta 0.1 --rl-kl-in-reward --rl-kl-estimator "
        "k1 --global-batch-size 3",
        REWARDS,
    )
    run.reference.table = first_table() - 0.5
    batches = run.batches()
    rewards = [cast(float, REWARDS[i]) - 0.1 * 0.5 * COUNTS[i] for i in range(6)]
    means = [statistics.fmean(rewards[g : g + 3]) for g in (0, 3)]
    assert by_sample(batches, "advantages") == same_in_each(
        [r - means[i // 3] for i, r in enumerate(rewards)]
    )
    assert value(batches.metrics, "forward/old") == 2  # the KL needs log-probs before the update
    assert value(batches.metrics, "forward/reference") == 2
    metrics = run.update(batches)
    assert value(metrics, "reward/kl") == pytest.approx(0.5)
    assert "loss/kl" not in metrics, "the KL must not count twice"


def test_the_kl_in_the_reward_is_of_the_trainers_logprobs(tmp_path: Path) -> None:
    """An engine whose log-probs are off changes neither the KL nor the advantages."""
    flags = "--grpo-kl-beta 0.1 --rl-kl-in-reward --rl-kl-estimator k1 --global-batch-size 3"
    found = []
    for off in (0.0, 0.125):
        run = make_run(tmp_path, flags, REWARDS)
        run.reference.table = first_table() - 0.5
        run.engine.stale = off
        batches = run.batches()
        for m in batches.micro_batches:
            gaps = (m.column("rollout_logprobs") - m.column("old_logprobs")).tolist()
            assert gaps == pytest.approx([off] * len(gaps), abs=1e-6)
        assert value(batches.metrics, "reward/kl") == pytest.approx(0.5)
        found.append(by_sample(batches, "advantages"))
    assert found[0] == found[1]


@pytest.mark.parametrize("in_reward", [True, False])
@pytest.mark.parametrize(("distance", "grows"), [(0.5, True), (0.01, False)])
def test_the_coefficient_follows_the_kl(
    tmp_path: Path, in_reward: bool, distance: float, grows: bool
) -> None:
    where = "--rl-kl-in-reward" if in_reward else ""
    run = make_run(
        tmp_path,
        f"--grpo-kl-beta 0.1 --rl-kl-estimator k1 --rl-kl-target 0.1 --rl-kl-horizon 60 {where}",
        REWARDS,
    )
    run.reference.table = first_table() - distance
    metrics = run.update(run.batches())
    assert value(metrics, "policy/kl_beta") == 0.1  # that of the step itself
    assert run.state.kl_beta == pytest.approx(0.1 * (1.02 if grows else 0.98))


def test_a_constant_coefficient_stays(tmp_path: Path) -> None:
    run = make_run(tmp_path, "--grpo-kl-beta 0.1", REWARDS)
    run.update(run.batches())
    assert run.state.kl_beta == 0.1


# --- losses ------------------------------------------------------------------------------------


@pytest.mark.parametrize("correction", ["", "--rl-inference-logprobs-is-correction"])
@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_every_loss_trains_and_reports_the_same_names_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str, correction: str
) -> None:
    flags = f"--rl-policy-loss {loss} --global-batch-size 3 --grpo-kl-beta 0.1 {correction}"
    run = make_run(tmp_path, flags, REWARDS)
    batches = run.batches()
    spoken = run.update(batches)
    first, second = run.policy.gradients
    assert first.isfinite().all() and second.isfinite().all() and first.any() and second.any()
    assert run.state.version == 2

    def silent(self: TablePolicy, *args: Any) -> MetricSet:
        self.table.grad = torch.zeros(VOCAB)
        return MetricSet()

    monkeypatch.setattr(TablePolicy, "forward_backward", silent)
    assert run.update(batches).keys() == spoken.keys()


@pytest.mark.parametrize(
    ("choice", "before", "during"),
    # an update needs log-probs of the present policy: the old ones are, before the first update
    [("on-policy", 2, 1), ("recompute", 2, 1), ("rollout", 0, 2)],
)
@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_passes_of_a_loss_that_selects(
    tmp_path: Path, loss: str, choice: str, before: int, during: int
) -> None:
    flags = f"--rl-policy-loss {loss} --global-batch-size 3 --old-logprob {choice}"
    run = make_run(tmp_path, flags, REWARDS)
    batches = run.batches()
    assert run.policy.num_passes == before
    run.update(batches)
    assert run.policy.num_passes == before + during


def test_kl_cov_selects_by_the_tokens_of_the_whole_optimizer_step(tmp_path: Path) -> None:
    """One of fifteen tokens, in three micro-batches: not one of each."""
    flags = "--rl-policy-loss kl_cov --rl-cov-ratio 0.1 --rl-advantage-estimator dr_grpo"
    run = make_run(tmp_path, flags, REWARDS)
    (batch,) = run.batches().updates
    assert len(batch.micro_batches) == 3
    chosen = select_tokens(run.config, run.policy, batch, 0, old_is_present=True)
    logp = first_table()
    of_sample = expected("dr_grpo")
    order = [i for m in batch.micro_batches for i in m.sample_ids]
    rows = [(float(logp[t]), of_sample[i]) for i in order for t in response_of(i)]
    mean, advantage = (statistics.fmean(column) for column in zip(*rows, strict=True))
    covariances = [(p - mean) * (a - advantage) for p, a in rows]
    best = {i for i, c in enumerate(covariances) if c == max(covariances)}
    found = torch.cat([m.column("covariance_mask") for m in chosen.micro_batches])
    assert int(found.sum()) == 1 and set(found.nonzero()[:, 0].tolist()) <= best


def test_a_rejected_sample_has_no_gradient(tmp_path: Path) -> None:
    """The engine is off at every token: sequences of up to two tokens stay within the bound."""
    flags = "--rl-rejection k1 --rl-rejection-threshold 0.3 --rl-rejection-level sequence"
    run = make_run(tmp_path, flags, REWARDS)
    run.engine.stale = 0.125
    metrics = run.update(run.batches())
    (gradient,) = run.policy.gradients
    kept = [i for i, n in enumerate(COUNTS) if 0.125 * n <= 0.3]
    moved = {int(t) - 4 for t in gradient[4:].nonzero()[:, 0] + 4}
    assert 0 < len(kept) < 6 and moved == set(kept)
    rejected = sum(n for i, n in enumerate(COUNTS) if i not in kept) / NUM_TOKENS
    assert value(metrics, "correction/rejected_fraction") == pytest.approx(rejected)


def test_importance_weights_compare_the_engine_with_the_weights_that_sampled(
    tmp_path: Path,
) -> None:
    """Also in later updates, where the present policy is another one."""
    flags = "--rl-inference-logprobs-is-correction --global-batch-size 3"
    run = make_run(tmp_path, flags, REWARDS)
    run.engine.stale = -0.125
    metrics = run.update(run.batches())
    plain = make_run(tmp_path, "--global-batch-size 3", REWARDS)
    plain.update(plain.batches())
    first, _ = run.policy.gradients
    torch.testing.assert_close(first, plain.policy.gradients[0] * math.exp(0.125))
    assert value(metrics, "correction/weight") == pytest.approx(math.exp(0.125))
