"""Checks where only what changed of the weights may be sent to the engines."""

from __future__ import annotations

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.memory import OffloadMode


def check_deltas(config: RLRunConfig) -> None:
    """Refuse ``--reshard-deltas`` where engines may lose what it compares with. Pure.

    Raises:
        UsageError: The message names the flag, the reason and the fix.
    """
    choice, memory = config.rollout.reshard_deltas, config.memory
    if choice == "off":
        return
    modes = [m for m in OffloadMode if memory.rl_offload in (m.value, OffloadMode.AUTO.value)]
    if any(mode.sleeps_deeply(memory.rollout_sleep) for mode in modes):
        raise UsageError(
            f"--reshard-deltas {choice}: engines must keep their weights between updates, and with "
            f"--rollout-sleep {memory.rollout_sleep} and --rl-offload {memory.rl_offload} they may "
            "free them; give --rollout-sleep kv, or --reshard-deltas off"
        )
