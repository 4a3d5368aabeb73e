"""Which algorithm flags belong together; contradictions are in test_refusals.py."""

from __future__ import annotations

import re

import pytest
from support.checked_runs import configured

from mindspeed_rl.algorithms.policy_losses import POLICY_LOSSES
from mindspeed_rl.command_line.arguments import OwnFlag, own_flags
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.flag_checks.algorithms import check_algorithms


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
        "--rollout-graph-sizes auto --rollout-graph-count 4",
        "--rl-routing-replay trainer --old-logprob recompute",
        "--rl-routing-replay rollout --old-logprob rollout",
        "--rl-routing-replay rollout --rollout-rebalance waiting",
        "--old-logprob recompute --old-logprob-pass tail --grpo-kl-beta 0.1 --reference-pass tail "
        "--lora-rank 4",
        "--prompt-order by-length --response-length-cap-factor 1.5 --response-length-cap-floor 16 "
        "--rl-overlong-buffer 8 --rollout-rebalance all",
    ],
)
def test_what_belongs_together_is_accepted(flags: str) -> None:
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
        unread = next(c for c in (*decider.info.choices, 0) if not needs.met_by(c))
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
