"""Contradictions between algorithm flags are refused: flag, value, what is allowed, fix."""

from __future__ import annotations

import pytest
from support.checked_runs import configured

from mindspeed_rl.algorithms.policy_losses import POLICY_LOSSES
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.config.check_algorithms import check_algorithms


def check(flags: str) -> RLRunConfig:
    config = configured(RLRunConfig, flags)
    check_algorithms(config)
    return config


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--grpo-group-size 1 --rl-advantage-estimator reinforce_plus_plus --rl-gamma 0.99",
        "--grpo-group-size 1 --rl-advantage-estimator remax",
        "--grpo-no-std-normalization --rl-loss-aggregation seq-mean-token-sum-norm",
        "--rl-policy-loss gspo --grpo-clamp-eps-lower 3e-4 --grpo-clamp-eps-upper 4e-4",
        "--rl-policy-loss ppo --rl-clip-ratio-c 3",
        "--rl-policy-loss clip_cov --rl-clip-cov-lower 0.5 --rl-cov-ratio 0.01",
        "--rl-policy-loss kl_cov --rl-kl-cov-coef 0.5",
        "--rl-policy-loss sapo --rl-sapo-tau-neg 1.2",
        "--rl-policy-loss dro --rl-dro-beta 0.1",
        "--rl-policy-loss dppo_tv --rl-dppo-ratio-cap 5",
        "--grpo-kl-beta 0.05 --rl-kl-in-reward --rl-kl-estimator k1 --rl-kl-target 0.1",
        "--rl-inference-logprobs-is-correction --rl-importance-sampling-truncation-coef 5 "
        "--rl-is-correction-mode mask --rl-is-correction-lower 0.2",
        "--rl-rejection k3 --rl-rejection-threshold 0.01 --rl-rejection-level geometric",
        "--grpo-filter-groups-with-same-reward --rl-max-resample 2 --rl-resample-exhausted stop",
        "--grpo-filter-groups-with-same-reward --rl-resample-factor 2 --old-logprob rollout",
        "--grpo-filter-groups-with-same-reward --rl-resample-factor 2 --old-logprob recompute "
        "--rl-inference-logprobs-is-correction",
        "--rl-overlong-filtering --rl-overlong-buffer 16 --rl-overlong-penalty 0.5",
        "--rl-advantage-estimator gae --grpo-group-size 1 --gae-gamma 0.99 --gae-lambda 0.95 "
        "--critic-lr 1e-4 --value-clip 0.2 --num-critic-only-steps 2 --train-iters 3",
        "--grpo-kl-beta 0.01 --ref-update-interval 10",
        "--reward-model-hf-checkpoint rm --reward-model-weight 0.5",
        "--rl-routing-replay trainer --old-logprob recompute",
        "--rl-routing-replay rollout --old-logprob rollout",
        "--rl-routing-replay rollout --rollout-rebalance waiting",
    ],
)
def test_what_belongs_together_is_accepted(flags: str) -> None:
    check(flags)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--grpo-group-size 1", "--grpo-group-size 1: .* at least 2 .* remax"),
        ("--grpo-group-size 0 --rl-advantage-estimator remax", "--grpo-group-size 0"),
        ("--critic-lr 1e-4",
         "--critic-lr 0.0001 has no effect with --rl-advantage-estimator grpo; .* with gae"),
        ("--rl-advantage-estimator gae --critic-warmup-steps 3 --train-iters 3",
         "--critic-warmup-steps 3: the run has --train-iters 3, .*; lower it"),
        ("--ref-update-interval 2", "--ref-update-interval 2 has no effect without --grpo-kl-beta"),
        ("--reward-model-weight 2", "has no effect without --reward-model-hf-checkpoint"),
        ("--reward-model-hf-checkpoint rm --grpo-filter-groups-with-same-reward",
         "--grpo-filter-groups-with-same-reward needs rewards while .*; remove one"),
        ("--reward-model-hf-checkpoint rm --rl-advantage-estimator remax",
         "--rl-advantage-estimator remax needs rewards while .*; remove one"),
        ("--rl-routing-replay trainer --old-logprob rollout",
         "--rl-routing-replay trainer records .*; use on-policy or recompute"),
        ("--rl-routing-replay rollout --rollout-rebalance all",
         "--rl-routing-replay rollout: not with --rollout-rebalance all: .* remove one"),
        ("--rl-routing-replay rollout --partial-rollout-tokens 8 --old-logprob rollout",
         "--rl-routing-replay rollout: not with --partial-rollout-tokens 8"),
        ("--rl-routing-replay rollout --grpo-filter-groups-with-same-reward "
         "--rl-resample-factor 2 --old-logprob rollout",
         "--rl-routing-replay rollout: not with --rl-resample-factor 2: .*replay trainer"),
        ("--rl-routing-replay rollout --rl-environment calculator",
         "--rl-routing-replay rollout: not with --rl-environment"),
        ("--rl-gamma 0.9", "--rl-gamma 0.9 has no effect with --rl-advantage-estimator grpo; .*"),
        ("--grpo-no-std-normalization --rl-advantage-estimator rloo",
         "--grpo-no-std-normalization has no effect with --rl-advantage-estimator rloo; .* "
         "grpo"),
        ("--rl-policy-loss sapo --grpo-clamp-eps-upper 0.28",
         "--grpo-clamp-eps-upper 0.28 has no effect with --rl-policy-loss sapo; .* cispo"),
        ("--rl-clip-ratio-c 3 --rl-policy-loss gspo",
         "--rl-clip-ratio-c 3.0 has no .*ppo, clip_co"),
        ("--rl-clip-ratio-c 0.5", "--rl-clip-ratio-c 0.5: must be above 1"),
        ("--rl-clip-ratio-c 1", "--rl-clip-ratio-c 1: must be above 1"),
        ("--rl-policy-loss sapo --rl-sapo-tau-pos 0", "--rl-sapo-tau-pos: .* more than 0"),
        ("--rl-policy-loss clip_cov --rl-clip-cov-lower 5",
         "--rl-clip-cov-lower 5 is not below --rl-clip-cov-upper 5"),
        ("--rl-dro-beta 1", "--rl-dro-beta 1.0 has no effect with --rl-policy-loss ppo; .* dro"),
        ("--rl-kl-in-reward", "--rl-kl-in-reward has no effect without --grpo-kl-beta"),
        ("--rl-kl-target 0.1", "--rl-kl-target 0.1 has no effect without --grpo-kl-beta"),
        ("--rl-kl-estimator k2", "--rl-kl-estimator k2 has no effect without --grpo-kl-beta"),
        ("--grpo-kl-beta 1 --rl-kl-in-reward --rl-kl-estimator k3+",
         r"--rl-kl-estimator k3\+ differs from k3 in its gradient alone"),
        ("--rl-importance-sampling-truncation-coef 5",
         "--rl-importance-sampling-truncation-coef 5.0 has no effect without "
         "--rl-inference-logprobs-is-correction; add it"),
        ("--rl-inference-logprobs-is-correction --rl-is-correction-lower 0.1",
         "--rl-is-correction-lower 0.1 has no effect with --rl-is-correction-mode truncate"),
        ("--rl-inference-logprobs-is-correction --rl-importance-sampling-truncation-coef 0.5",
         "--rl-importance-sampling-truncation-coef: .* of at least 1"),
        ("--rl-rejection-threshold 1",
         "--rl-rejection-threshold 1.0 .* --rl-rejection none; .* k3"),
        ("--rl-max-resample 2",
         "--rl-max-resample 2 has no effect without --grpo-filter-groups-with-same-reward"),
        ("--grpo-filter-groups-with-same-reward --grpo-group-size 1 --rl-advantage-estimator "
         "remax",
         "--grpo-filter-groups-with-same-reward: with --grpo-group-size 1 every group"),
        ("--rl-overlong-buffer 129", "--rl-overlong-buffer 129 is longer than --rollout-max-re"),
        ("--rl-overlong-penalty 2",
         "--rl-overlong-penalty 2.0 has no effect without --rl-overlong"),
        ("--grpo-filter-groups-with-same-reward --rl-resample-factor 1.5",
         "--rl-resample-factor 1.5 carries samples of older weights .* --old-logprob rollout"),
        ("--grpo-filter-groups-with-same-reward --rl-resample-factor 2 --old-logprob recompute",
         "which --old-logprob recompute does not weigh"),
        ("--rl-rejection k1 --old-logprob rollout",
         "--old-logprob rollout puts the engine's log-probs into the ratio"),
    ],
)  # fmt: skip
def test_a_contradiction_is_refused(flags: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check(flags)


def test_the_aggregation_is_that_of_the_source_unless_given() -> None:
    by_sequence = {
        loss
        for loss in POLICY_LOSSES
        if check(f"--rl-policy-loss {loss}").policy_loss.aggregation == "seq-mean-token-mean"
    }
    assert by_sequence == {"gspo", "geo_mean", "sapo"}
    given = check("--rl-policy-loss gspo --rl-loss-aggregation token-sum")
    assert given.policy_loss.aggregation == "token-sum"
