"""Where only what changed of the weights may be sent."""

from __future__ import annotations

import pytest
from support.checked_runs import configured

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.flag_checks.deltas import check_deltas_on, cost_of_deltas
from mindspeed_rl.flag_checks.needs import check_needs

DELTAS = "--reshard-deltas device"


@pytest.mark.parametrize(
    ("platform", "flags"),
    [
        ("cpu", ""),
        ("cpu", "--rollout-sleep all --rl-offload all"),
        ("cpu", DELTAS),
        ("cpu", f"{DELTAS} --rollout-sleep kv --rl-offload all"),
        ("cpu", f"{DELTAS} --rl-offload optimizer"),
        ("cuda", f"{DELTAS} --rollout-sleep all"),
        ("cuda", "--reshard-deltas host --rl-offload all"),
    ],
)
def test_engines_that_keep_their_weights_or_have_a_host_are_accepted(
    platform: str, flags: str
) -> None:
    check_deltas_on(configured(RLRunConfig, flags), platform)


@pytest.mark.parametrize(
    "flags",
    [
        "--reshard-deltas host --rl-offload all",
        f"{DELTAS} --rollout-sleep all",
        f"{DELTAS} --rollout-sleep all --rl-offload none",
    ],
)
def test_a_host_does_not_copy_weights_to_itself(flags: str) -> None:
    with pytest.raises(UsageError, match=r"--reshard-deltas .*--rollout-sleep kv"):
        check_deltas_on(configured(RLRunConfig, flags), "cpu")


def test_whole_tensors_are_never_changes() -> None:
    config = configured(RLRunConfig, f"{DELTAS} --reshard-path stream")
    with pytest.raises(UsageError, match="--reshard-deltas device has no effect"):
        check_needs(config)


@pytest.mark.parametrize(
    ("flags", "relays"),
    [("", True), ("--reshard-relay off", False), (f"{DELTAS} --rl-offload none", False)],
)
def test_changes_are_not_relayed(flags: str, relays: bool) -> None:
    rollout = configured(RLRunConfig, flags).rollout
    assert rollout.relays(32, 16, experts_everywhere=False) is relays
    assert not rollout.relays(16, 16, experts_everywhere=False), "one node"
    assert not rollout.relays(32, 16, experts_everywhere=True)


def test_a_dry_run_says_where_changes_pay() -> None:
    """Coding costs seconds per byte, all weights cost the time of a link."""
    assert cost_of_deltas("off", "cpu") == ""
    for platform, seconds, speed in (("cpu", "2.4", "0.4"), ("cuda", "0.5", "2")):
        line = cost_of_deltas("host", platform)
        assert line.startswith(f"--reshard-deltas host: coding and decoding take about {seconds} s")
        assert line.endswith(f"slower than about {speed} GB/s")
