"""Contradictions between algorithm flags are refused: flag, value, what is allowed, fix."""

from __future__ import annotations

import re

import pytest
from support.checked_runs import configured

from mindspeed_rl.algorithms.policy_losses import POLICY_LOSSES
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.config.arguments import OwnFlag, own_flags
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
        ("--rl-clip-ratio-c 0.5", "--rl-clip-ratio-c 0.5: must be above 1"),
        ("--rl-clip-ratio-c 1", "--rl-clip-ratio-c 1: must be above 1"),
        ("--rl-policy-loss sapo --rl-sapo-tau-pos 0", "--rl-sapo-tau-pos: .* more than 0"),
        ("--rl-policy-loss clip_cov --rl-clip-cov-lower 5",
         "--rl-clip-cov-lower 5 is not below --rl-clip-cov-upper 5"),
        ("--grpo-kl-beta 1 --rl-kl-in-reward --rl-kl-estimator k3+",
         r"--rl-kl-estimator k3\+ differs from k3 in its gradient alone"),
        ("--rl-inference-logprobs-is-correction --rl-importance-sampling-truncation-coef 0.5",
         "--rl-importance-sampling-truncation-coef: .* of at least 1"),
        ("--rl-rejection-threshold 1",
         "--rl-rejection-threshold 1.0 .* --rl-rejection none; .* k3"),
        ("--grpo-filter-groups-with-same-reward --grpo-group-size 1 --rl-advantage-estimator "
         "remax",
         "--grpo-filter-groups-with-same-reward: with --grpo-group-size 1 every group"),
        ("--rl-overlong-buffer 129", "--rl-overlong-buffer 129 is longer than --rollout-max-re"),
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


NEEDY = [f for _, own in own_flags(RLRunConfig) for f in own if f.info.needs is not None]


def changed(flag: OwnFlag) -> str:
    """A flag with an allowed value that is not its default."""
    name, info = flag.spellings[0], flag.info
    if flag.kind is bool:
        return name
    if flag.kind is str:
        return f"{name} {next((c for c in info.choices if c != flag.default), 'text')}"
    numbers = [flag.kind(n) for n in (2, 1, 0.5, 0)]
    return f"{name} {next(n for n in numbers if n != flag.default and info.allows(n))}"


@pytest.mark.parametrize("flag", NEEDY, ids=lambda flag: flag.field)
def test_a_flag_that_nothing_reads_is_refused(flag: OwnFlag) -> None:
    """Alone, unless the default of what it needs reads it; then with a value that does not."""
    deciders = {f.spellings[0]: f for _, own in own_flags(RLRunConfig) for f in own}
    needs = flag.info.needs
    assert needs is not None and str(needs) in flag.help
    decider, other = deciders[needs.flag], ""
    if needs.met_by(decider.default):
        unread = next(c for c in decider.info.choices if not needs.met_by(c))
        other = f"{needs.flag} {unread}"
    told = f"{re.escape(changed(flag).split()[0])}.* has no effect with(out)? {needs.flag}"
    with pytest.raises(ValueError, match=told):
        check(f"{changed(flag)} {other}")


def test_the_aggregation_is_that_of_the_source_unless_given() -> None:
    by_sequence = {
        loss
        for loss in POLICY_LOSSES
        if check(f"--rl-policy-loss {loss}").policy_loss.aggregation == "seq-mean-token-mean"
    }
    assert by_sequence == {"gspo", "geo_mean", "sapo"}
    given = check("--rl-policy-loss gspo --rl-loss-aggregation token-sum")
    assert given.policy_loss.aggregation == "token-sum"
