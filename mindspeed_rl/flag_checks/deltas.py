"""Checks where only what changed of the weights may be sent to the engines, and what it costs."""

from __future__ import annotations

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.memory import OffloadMode

# Seconds of coding and decoding per GB of bf16 weights, at a learning rate of 1e-6.
_SECONDS_PER_GB = {"cpu": 2.4, "cuda": 0.5}
# Bytes of a code, of those of the weights, at that learning rate.
_SHARE = 0.015
_BASIS = {
    "cpu": "of a processor core, as measured",
    "cuda": "of the device, as predicted from the number of kernels; no GPU has run it",
}


def check_deltas_on(config: RLRunConfig, platform: str) -> None:
    """Refuse ``--reshard-deltas`` where it would gain nothing. Pure.

    NPUs lack the arithmetic of the code. Engines whose weights are freed have a copy on the host
    meanwhile, which frees nothing where the device is the host.

    Args:
        config: Configuration of the run.
        platform: ``"cpu"``, ``"cuda"`` or ``"npu"``.

    Raises:
        UsageError: The message names the flag, the reason and the fix.
    """
    choice = config.rollout.reshard_deltas
    if choice != "off" and platform == "npu":
        raise UsageError(
            f"--reshard-deltas {choice}: coding takes shifts and prefix sums of 64-bit integers, "
            "comparisons of 16-bit ones and sums of bytes, for which no kernel of an NPU's AI "
            "Cores is known: its slow processor (AICPU) would run them; give --reshard-deltas off"
        )
    memory = config.memory
    auto = memory.rl_offload == OffloadMode.AUTO.value  # where the device is the host: none
    mode = OffloadMode.NONE if auto else OffloadMode(memory.rl_offload)
    if choice != "off" and platform == "cpu" and mode.sleeps_deeply(memory.rollout_sleep):
        raise UsageError(
            f"--reshard-deltas {choice}: with --rollout-sleep {memory.rollout_sleep} and "
            f"--rl-offload {memory.rl_offload} the engine's weights would be copied to the host "
            "while the trainer trains, which frees nothing on a CPU; give --rollout-sleep kv, or "
            "--reshard-deltas off"
        )


def cost_of_deltas(choice: str, platform: str) -> str:
    """Return a sentence about where ``--reshard-deltas`` pays; empty where it is off. Pure.

    Args:
        choice: Value of the flag.
        platform: ``"cpu"`` or ``"cuda"``.
    """
    if choice == "off":
        return ""
    seconds = _SECONDS_PER_GB[platform]
    return (
        f"--reshard-deltas {choice}: coding and decoding take about {seconds:g} s per GB of bf16 "
        f"weights at a learning rate of 1e-6 ({_BASIS[platform]}), so it pays where a rank's "
        f"weights travel slower than about {(1 - _SHARE) / seconds:.1g} GB/s"
    )
