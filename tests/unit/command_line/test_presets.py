"""Algorithms by name, and the line of the numbers by which a run learns."""

from dataclasses import replace

import pytest

from mindspeed_rl.algorithms.presets import PRESETS
from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.command_line.dispositions import disposition_lines
from mindspeed_rl.command_line.settings import settings_lines
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.flag_checks.algorithms import check_algorithms

NEEDED = "--hf-checkpoint x --prompt-data y --train-iters 20 --rollout-max-response-length 700"


def parsed(text: str):
    return parse(RLRunConfig, [*NEEDED.split(), *text.split()], "test")


# The papers' settings, by configuration field.
EXPECTED = {
    "grpo": {"rl_advantage_estimator": "grpo", "rl_policy_loss": "ppo", "eps_upper": 0.2},
    "dapo": {
        "rl_advantage_estimator": "grpo", "rl_policy_loss": "ppo", "eps_lower": 0.2,
        "eps_upper": 0.28, "rl_loss_aggregation": "token-mean", "rl_overlong_buffer": 140,
        "grpo_filter_groups_with_same_reward": True,
    },
    "dr_grpo": {
        "rl_advantage_estimator": "dr_grpo", "rl_loss_aggregation": "seq-mean-token-sum-norm",
    },
    "ppo": {"rl_advantage_estimator": "gae", "grpo_group_size": 1, "gae_lambda": 0.95},
    "gspo": {
        "rl_policy_loss": "gspo", "eps_lower": 3e-4, "eps_upper": 4e-4,
        "rl_loss_aggregation": "seq-mean-token-mean",
    },
    "cispo": {
        "rl_policy_loss": "cispo", "eps_lower": 1.0, "eps_upper": 4.0,
        "rl_loss_aggregation": "token-mean",
    },
    "rloo": {"rl_advantage_estimator": "rloo", "rl_policy_loss": "gpg"},
    "distillation": {
        "rl_advantage_estimator": "none", "rl_policy_loss": "ppo",
        "rl_loss_aggregation": "token-mean",
    },
    "reinforce++": {
        "rl_advantage_estimator": "reinforce_plus_plus", "grpo_group_size": 1,
        "grpo_kl_beta": 0.01, "rl_kl_in_reward": True, "rl_kl_estimator": "k1",
    },
}  # fmt: skip


def values_of(config: RLRunConfig) -> dict[str, object]:
    sections = (
        *(config.rl, config.advantages, config.estimation, config.policy_loss, config.surrogate),
        *(config.kl, config.sampling),
    )
    return {
        name: getattr(section, name)
        for section in sections
        for name in section.__dataclass_fields__
    }


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_published_settings_and_nothing_else(name):
    needed = " --teacher-hf-checkpoint t" if name == "distillation" else ""
    config = parsed(f"--rl-preset {name}{needed}").config
    check_algorithms(config)
    plain = values_of(parsed("").config)
    changed = {k: v for k, v in values_of(config).items() if v != plain[k]}
    expected = EXPECTED[name] | {"rl_preset": name}
    assert changed == {k: v for k, v in expected.items() if v != plain[k]}
    assert {k: values_of(config)[k] for k in expected} == expected


def test_what_is_typed_counts_wherever_it_stands():
    first = parsed("--grpo-clamp-eps-upper 0.25 --rl-algorithm dapo --rl-overlong-buffer 7")
    last = parsed("--rl-preset dapo --rl-overlong-buffer 7 --grpo-clamp-eps-upper 0.25")
    assert first.config == last.config
    assert first.config.surrogate.eps_upper == 0.25
    assert first.config.sampling.rl_overlong_buffer == 7
    assert first.config.surrogate.eps_lower == 0.2
    counts, told, *_ = disposition_lines(first, ())
    assert counts.startswith("flags: 7 honoured")  # those of the preset are not the user's
    assert told == (
        "--rl-preset dapo: --rl-advantage-estimator grpo --rl-policy-loss ppo "
        "--rl-loss-aggregation token-mean --grpo-clamp-eps-lower 0.2 "
        "--grpo-filter-groups-with-same-reward; set by you: --grpo-clamp-eps-upper "
        "--rl-overlong-buffer"
    )


def test_an_alias_of_a_flag_counts_as_typed():
    config = parsed("--rl-preset gspo --grpo_clamp_eps_lower 0.1").config
    assert (config.surrogate.eps_lower, config.surrogate.eps_upper) == (0.1, 4e-4)


@pytest.mark.parametrize(
    ("typed", "on"),
    [
        ("--rl-preset dapo", True),
        ("--rl-preset dapo --no-grpo-filter-groups-with-same-reward", False),
        ("--no_grpo_filter_groups_with_same_reward --rl-preset dapo", False),
        ("--no-grpo-filter-groups-with-same-reward", False),
        ("--grpo-filter-groups-with-same-reward --no-grpo-filter-groups-with-same-reward", False),
        (
            "--no-grpo-filter-groups-with-same-reward --grpo-filter-groups-with-same-reward",
            True,
        ),
    ],
)
def test_switches_of_a_preset_can_be_kept_off(typed, on):
    assert parsed(typed).config.sampling.grpo_filter_groups_with_same_reward is on


def test_an_unknown_name_is_refused_with_those_that_there_are():
    with pytest.raises(UsageError, match=r"--rl-preset.*'gpro'.*reinforce\+\+"):
        parsed("--rl-preset gpro")


def test_the_numbers_of_the_update_are_said():
    config = parsed(
        "--rl-preset dapo --lr 3e-5 --lr-decay-style cosine --min-lr 2e-6 --lr-warmup-iters 4 "
        "--weight-decay 0.1 --adam-beta2 0.98 --clip-grad 0.7 --grpo-kl-beta 0.002 "
        "--rl-default-temperature 0.9"
    ).config
    line, note = settings_lines(config, 494_000_000)
    assert line == (
        "optimizer: learning rate 3e-05 cosine to 2e-06 after 4 steps of warm-up, weight decay "
        "0.1, betas 0.9 0.98, gradients clipped at norm 0.7; temperature 0.9; clip bounds 0.2 "
        "below and 0.28 above; KL (k3) in the loss x 0.002"
    )
    assert note.startswith("note: --lr 3e-05 is that of a pretraining script")
    assert len(settings_lines(config, 2_000_000)) == 1  # tiny models learn by such rates
    slow = replace(config, train=replace(config.train, lr=2e-6))
    assert len(settings_lines(slow, 494_000_000)) == 1
    share = parsed("--lr 2e-6 --lr-warmup-fraction .0015").config
    assert "2e-06 constant after a warm-up of 0.15 % of the steps," in settings_lines(share, 1)[0]
    without = parsed("--rl-preset rloo").config
    assert settings_lines(without, 1)[0].endswith("temperature 1; no KL to a reference")


def test_a_line_of_progress_has_the_name_of_the_preset():
    names = ("--rl-preset dapo", "--rl-preset ppo", "--rl-advantage-estimator gae", "")
    assert [parsed(flags).config.algorithm for flags in names] == ["dapo", "ppo", "gae", "grpo"]
