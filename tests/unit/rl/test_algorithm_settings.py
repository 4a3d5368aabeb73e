"""Flags to the settings of the algorithms: each reads its own flag."""

from __future__ import annotations

import pytest

from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.rl.critic import critic_loss
from mindspeed_rl.rl.update import loss_settings, selection_seed


def config(flags: str) -> RLRunConfig:
    required = "--hf-checkpoint x --prompt-data x --output-dir x --train-iters 1 "
    return parse(RLRunConfig, (required + flags).split(), "test").config


def test_the_two_clips_of_the_ratio_are_told_apart() -> None:
    flags = config("--grpo-clamp-eps-lower 0.1 --grpo-clamp-eps-upper 0.25")
    surrogate = loss_settings(flags, 0.0).surrogate
    assert (surrogate.eps_lower, surrogate.eps_upper) == (0.1, 0.25)


def test_the_critic_has_a_clip_of_its_own() -> None:
    flags = config("--grpo-clamp-eps-lower 0.1 --grpo-clamp-eps-upper 0.25 --value-clip 0.4")
    assert critic_loss(flags).keywords["clip"] == 0.4


@pytest.mark.parametrize(("where", "in_loss"), [("", 0.3), ("--rl-kl-in-reward", 0.0)])
def test_the_kl_is_in_the_loss_or_in_the_reward(where: str, in_loss: float) -> None:
    assert loss_settings(config(f"--grpo-kl-beta 0.1 {where}"), 0.3).kl_beta == in_loss


def test_every_update_selects_with_a_seed_of_its_own() -> None:
    """Else clip-cov would hold back tokens at the same places in every update."""
    seeds = {selection_seed(seed, update) for seed in (0, 1, 1234) for update in range(50)}
    assert len(seeds) == 3 * 50
