"""What a run may use of a device and what it assumes: one answer for dry runs and runs."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import replace

from mindspeed_rl.config import PretrainRunConfig, RLRunConfig
from mindspeed_rl.config.npu import group_buffers
from mindspeed_rl.dryrun.machine import SHIPPED, Machine, read_machine
from mindspeed_rl.memory.assumptions import MemoryAssumptions
from mindspeed_rl.memory.owners import OffloadMode
from mindspeed_rl.memory.prediction import MemoryPrediction

Config = RLRunConfig | PretrainRunConfig
_GIB, _MIB = 2**30, 2**20
# Buffers that vLLM-Ascend asks for, whatever HCCL_BUFFSIZE is; its group for dispatch follows that.
_ENGINE_BUFFERS_MB = {"rollout tp": 200, "rollout ep": 200, "rollout dp": 50}


def machine_on(config: Config, platform: str) -> Machine:
    """The machine of ``--rl-dry-run-machine``, or the first shipped one of a run's platform.

    Args:
        config: of the run.
        platform: ``"cpu"``, ``"cuda"`` or ``"npu"``.

    Raises:
        ValueError: the flag names no machine.
    """
    machine = read_machine(config.dry_run.rl_dry_run_machine)
    if machine.platform == platform:
        return machine
    shipped = tomllib.loads(SHIPPED.read_text(encoding="utf-8"))
    return read_machine(next(n for n, table in shipped.items() if table["platform"] == platform))


def device_bytes(config: Config, found_bytes: float) -> int:
    """Memory of a device: ``--device-memory-gb``, else what the machine or the driver says."""
    return int(config.device.device_memory_gb * _GIB or found_bytes)


def usable_bytes(device: int, machine: Machine, taken: int = 0) -> int:
    """What predictions may fill of a device.

    Args:
        device: bytes of it that the run may use.
        machine: driver, runtime and rounding are expected to take its ``reserved_gib``.
        taken: in use before the run; what of it exceeds ``reserved_gib`` is other processes'.
    """
    return max(0, device - max(taken, int(machine.reserved_gib * _GIB)))


def assumptions_of(config: Config, machine: Machine) -> MemoryAssumptions:
    """Machine and flags; the offload mode is still to be resolved."""
    npu = machine.platform == "npu"
    buffer_mb = os.environ.get("HCCL_BUFFSIZE", "")
    communicator = machine.communicator_mib
    if buffer_mb.isdecimal() and npu:
        communicator = 2.0 * int(buffer_mb)  # one to send, one to receive
    sizes_mb = _ENGINE_BUFFERS_MB | group_buffers(config.ascend.hccl_group_buffer) if npu else {}
    return MemoryAssumptions(
        kernels=machine.kernels,
        train_imbalance=config.dry_run.rl_dry_run_expert_imbalance,
        rollout_imbalance=config.dry_run.rl_dry_run_expert_imbalance,
        communicator_bytes=int(communicator * _MIB),
        group_bytes={name: 2 * size * _MIB for name, size in sizes_mb.items()},
        engine_mc2=npu,
        graph_bytes=int(machine.graph_mib * _MIB),
        copies_latent=npu,
        # vLLM-Ascend's kernels of latent attention have one size of blocks, vLLM's own on a CPU 16
        latent_block_tokens=128 if npu else 16,
        swap_parts=config.ascend.swap_optimizer_times if swaps_optimizer(config, machine) else 0,
    )


def swaps_optimizer(config: Config, machine: Machine) -> bool:
    """Whether MindSpeed keeps the optimizer state on the host: it can on NPUs only."""
    return config.ascend.swap_optimizer and machine.platform == "npu"


def resolve_offload(
    prediction: MemoryPrediction, ranks: Sequence[int], usable: int
) -> tuple[OffloadMode, str]:
    """What leaves the device during rollouts, and why. Pure.

    Args:
        prediction: of the run.
        ranks: that have to fit.
        usable: bytes of a device.
    """
    config = prediction.config
    if not isinstance(config, RLRunConfig):
        return OffloadMode.NONE, "nothing shares the device"
    asked = OffloadMode(config.memory.rl_offload)
    if asked is not OffloadMode.AUTO:
        return asked, "as --rl-offload says"
    limit = f"{usable / _GIB:.3g} GiB that may be used"
    mode = least_offload(prediction, ranks, usable)
    if mode is None:
        return OffloadMode.ALL, f"auto: the predicted peak exceeds the {limit}; see --rl-dry-run"
    return mode, f"auto: the least whose predicted peak fits the {limit}"


def least_offload(
    prediction: MemoryPrediction, ranks: Iterable[int], budget_bytes: int
) -> OffloadMode | None:
    """The least offload with which some ranks fit into a budget; ``None``: none does."""
    several = tuple(ranks)
    for mode in (OffloadMode.NONE, OffloadMode.OPTIMIZER, OffloadMode.ALL):
        changed = replace(prediction, assumptions=replace(prediction.assumptions, offload=mode))
        if changed.peak(several).num_bytes <= budget_bytes:
            return mode
    return None
