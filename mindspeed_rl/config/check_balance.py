"""Checks of the flags that distribute samples over engines."""

from __future__ import annotations

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.errors import UsageError


def check_balance(config: RLRunConfig) -> None:
    """Refuse flags that move samples between engines or steps together with an environment.

    Raises:
        UsageError: The message names the flags, their values, what is allowed and the fix.
    """
    flags, environment = config.balance, config.environment.rl_environment
    if environment:
        for name, given in (
            ("--partial-rollout-tokens", flags.partial_rollout_tokens or None),
            (
                "--rollout-rebalance",
                None if flags.rollout_rebalance == "off" else flags.rollout_rebalance,
            ),
        ):
            if given is not None:
                raise UsageError(
                    f"{name} {given}: not with --rl-environment {environment}, whose conversations "
                    "stay on the engine that holds them; remove one of the two"
                )
