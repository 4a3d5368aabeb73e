"""Flags of the driver of the ranks: what is refused and why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.rl_run import make_run

from mindspeed_rl.config.launch import LaunchConfig, check_launch
from mindspeed_rl.core.errors import UsageError

RAY = LaunchConfig(orchestrator="ray", ray_ranks_per_node=4)


@pytest.mark.parametrize(
    ("launch", "environ", "flag"),
    [
        (RAY, {"RANK": "0"}, "--orchestrator ray"),
        (replace(RAY, ray_ranks_per_node=0), {}, "--ray-ranks-per-node"),
        (replace(RAY, ray_address="ray://host:1"), {}, "--ray-address ray://host:1"),
        (replace(RAY, ray_num_nodes=2), {}, "--ray-num-nodes 2"),
        (replace(RAY, elastic_min_nodes=2), {}, "--elastic-min-nodes 2: .* --ray-num-nodes 1"),
    ],
)
def test_what_does_not_fit_is_refused(
    launch: LaunchConfig, environ: dict[str, str], flag: str
) -> None:
    with pytest.raises(UsageError, match=flag):
        check_launch(launch, environ, "entry")


def test_possible_launches() -> None:
    check_launch(LaunchConfig(), {"RANK": "3"}, "entry")
    check_launch(RAY, {}, "entry")
    several = replace(RAY, ray_num_nodes=2)
    check_launch(several, {"RAY_ADDRESS": "host:6379"}, "entry")
    check_launch(replace(several, ray_address="auto"), {}, "entry")
    assert several.num_ranks == 8


def test_rewards_follow_the_ranks_into_ray(tmp_path: Path) -> None:
    config = make_run(tmp_path).config
    assert not config.rewards_in_ray
    assert replace(config, launch=RAY).rewards_in_ray
    kept = replace(config, launch=RAY, rewards=replace(config.rewards, reward_pool="process"))
    assert not kept.rewards_in_ray
