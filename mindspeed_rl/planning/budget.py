"""Decides how much of a device a run may use and what it offloads, for dry runs and real runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from mindspeed_rl.config import RLRunConfig, ScoreRunConfig, TrainingRunConfig
from mindspeed_rl.config.dry_run import MACHINES, Machine
from mindspeed_rl.core.installed import engine_machine
from mindspeed_rl.core.memory import FIXED_MODES, MemoryOwner, MemoryPhase, OffloadMode
from mindspeed_rl.handover.offload import OffloadOrder, order_of_offload
from mindspeed_rl.planning.prediction import MemoryPrediction

_GIB = 2**30


def machine_on(config: TrainingRunConfig, platform: str | None = None) -> Machine:
    """Return the machine of ``--rl-dry-run-machine``, or the first one of another platform.

    A run on NPUs has the machine that the installed engine was built for. On NPUs communicators
    have the size of ``HCCL_BUFFSIZE``.

    Args:
        config: Configuration of the run.
        platform: That of a run, ``"cpu"``, ``"cuda"`` or ``"npu"``; ``None`` is that of the
            flag's machine.
    """
    machine = MACHINES[config.dry_run.rl_dry_run_machine]
    if platform == "npu":
        machine = npu_machine(config)
    elif platform not in (None, machine.platform):
        machine = _first_machine(platform)
    buffer_mb = os.environ.get("HCCL_BUFFSIZE", "")
    if buffer_mb.isdecimal() and machine.platform == "npu":
        return replace(machine, communicator_mib=2.0 * int(buffer_mb))  # to send and to receive
    return machine


def npu_machine(config: TrainingRunConfig | ScoreRunConfig) -> Machine:
    """Return the machine of a run on NPUs. Local.

    It is the one that the installed engine was built for, or that of ``--rl-dry-run-machine``.
    """
    if found := MACHINES.get(engine_machine()):
        return found
    if not isinstance(config, ScoreRunConfig):
        asked = MACHINES[config.dry_run.rl_dry_run_machine]
        if asked.platform == "npu":
            return asked
    return _first_machine("npu")


def _first_machine(platform: str | None) -> Machine:
    return next(machine for machine in MACHINES.values() if machine.platform == platform)


def device_bytes(config: TrainingRunConfig, found_bytes: float) -> int:
    """Return the bytes of a device: ``--device-memory-gb``, else those of machine or driver."""
    return int(config.device.device_memory_gb * _GIB or found_bytes)


def usable_bytes(device: int, machine: Machine, taken: int = 0) -> int:
    """Return the bytes of a device that predictions may fill.

    Args:
        device: Bytes of the device that the run may use.
        machine: Machine whose ``reserved_gib`` are for driver, runtime and rounding.
        taken: Bytes in use before the run; the excess over ``reserved_gib`` is of other processes.
    """
    return max(0, device - max(taken, int(machine.reserved_gib * _GIB)))


def resolve_offload(
    prediction: MemoryPrediction, ranks: Sequence[int], usable: int
) -> tuple[OffloadMode, str]:
    """Choose the trainer memory to offload during rollouts, and give the reason. Pure.

    Args:
        prediction: Prediction of the run.
        ranks: Ranks that have to fit.
        usable: Bytes of a device that predictions may fill.
    """
    config = prediction.config
    if not isinstance(config, RLRunConfig):
        return OffloadMode.NONE, "nothing shares the device"
    asked = OffloadMode(config.memory.rl_offload)
    if asked is not OffloadMode.AUTO:
        return asked, "as --rl-offload says"
    limit = f"{usable / _GIB:.3g} GiB that may be used"
    stay = _computing(config)
    modes = tuple(mode for mode in FIXED_MODES if stay.isdisjoint(mode.leaves))
    for mode in modes:
        if replace(prediction, offload=mode).peak(ranks).num_bytes <= usable:
            return mode, f"auto: the least whose predicted peak fits the {limit}"
    most = modes[-1]
    return most, f"auto: the predicted peak exceeds the {limit}; see --rl-dry-run"


def _computing(config: RLRunConfig) -> set[MemoryOwner]:
    """Return the owners of the models that compute while the last responses are generated."""
    shared = MemoryOwner.PARAMETERS if config.lora.is_on else MemoryOwner.REFERENCE
    owners = {"old": MemoryOwner.PARAMETERS, "reference": shared}
    return {owners[name] for name in config.rl.tail_passes}


def with_offload_order(
    prediction: MemoryPrediction, ranks: Sequence[int], usable: int
) -> MemoryPrediction:
    """Decide whether the optimizer state leaves before the weight update or beside it. Pure.

    Args:
        prediction: Prediction of the run with its mode of offloading.
        ranks: Ranks that have to fit.
        usable: Bytes of a device that predictions may fill.
    """
    config = prediction.config
    if not isinstance(config, RLRunConfig):
        return prediction
    beside = replace(prediction, order=OffloadOrder(True, ""))
    order = order_of_offload(
        config.memory.rl_offload_overlap,
        leaves=MemoryOwner.OPTIMIZER in prediction.offload.leaves and not prediction.swap_parts,
        on_host=prediction.machine.platform == "cpu",
        sync_bytes=beside.peaks(ranks)[MemoryPhase.SYNC],
        usable_bytes=usable,
    )
    return replace(prediction, order=order)
