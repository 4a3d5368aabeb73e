"""Flags of the device: its peak, its memory, what leaves it while the engine samples, leaks."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.core.flag import flag
from mindspeed_rl.core.memory import OffloadMode


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """The device of a rank.

    Example: --device-memory-gb 64
    """

    device_memory_gb: float = flag(
        0.0,
        "Memory of one device that may be in use, in GiB, as its driver counts: communicators, "
        "libraries and other processes of the device included; 0 takes what the driver reports, "
        "and no limit where the device is the host. Supervised runs: --rl-dry-run alone reads it.",
        minimum=0.0,
    )
    device_peak_tflops: float = flag(
        0.0,
        "Peak of one device in the precision of training, in 1e12 operations per second (of one "
        "die where a card has two), which model FLOPs utilisation is a share of; 0 takes the "
        "vendor's number for bf16, where it is known.",
        minimum=0.0,
    )


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """Memory of the shared devices.

    Trainer and engine take turns on the same device. While the engine samples, the trainer's
    gradients are dropped and its optimizer state (and its parameters) wait in pinned host memory;
    while the trainer trains, the engine's key/value cache (and its weights) are freed. What is on
    the device at the border of every phase is logged as memory/<phase>/<owner>_bytes.

    Example: --rl-offload optimizer --device-memory-gb 64 ends the run with a table of who owns what
    as soon as more than 64 GiB are in use at a border.
    """

    rl_offload: str = flag(
        OffloadMode.AUTO.value,
        "What of the trainer leaves the device during rollouts. "
        + "; ".join(f"{mode.value}: {mode.help}" for mode in OffloadMode)
        + ".",
        choices=tuple(mode.value for mode in OffloadMode),
    )
    rl_offload_overlap: str = flag(
        "auto",
        "When the optimizer state is copied to the host, where it leaves the device. auto: beside "
        "the weight update, if the device has room for both (--rl-dry-run tells), else before it; "
        "off: before it.",
        choices=("auto", "off"),
    )
    rollout_sleep: str = flag(
        "auto",
        "What of the engine is freed while the trainer trains. kv: the key/value cache; all: its "
        "weights, too, which every weight update brings back; auto: all with --rl-offload all, "
        "else kv.",
        choices=("auto", "kv", "all"),
    )
    memory_leak_mb: float = flag(
        64.0,
        "Warn when memory that no owner accounts for grows by more than this per step, in MiB, "
        "over the last 10 to 20 steps, the first 3 of the run left out; 0 never warns.",
        minimum=0.0,
    )
