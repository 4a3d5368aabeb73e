"""Checks devices, drivers and CANN of this node."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from mindspeed_rl.core.installed import ALLOW_SHARED_DEVICES, VISIBLE_DEVICES
from mindspeed_rl.core.ranks import counted
from mindspeed_rl.diagnosis.facts import Facts, local_size
from mindspeed_rl.diagnosis.npu_smi import DeviceProcess
from mindspeed_rl.diagnosis.rows import DoctorRow, green, note, red

AREA = "devices"
SHARED_MIB = 1024
"""Memory from which on a process counts as using a device. Every rank of a job holds some 130 MiB
of the first device."""
HELD = "the devices of this container are held by another container"
HELD_FIX = "stop that container (npu-smi info on the host names its processes), or pass others here"
_SYSTEM = (
    ("CANN", "cann", "install that version of the toolkit, kernels and NNAL, and source its "
     "set_env.sh"),
    ("driver (HDK)", "driver", "install that version of driver and firmware on the host"),
)  # fmt: skip


def device_rows(
    facts: Facts, platform: str, matrix: Mapping[str, Mapping[str, str]]
) -> Iterator[DoctorRow]:
    """Check the devices that ranks of this node can use.

    Args:
        facts: Facts of this machine.
        platform: ``cpu``, ``cuda`` or ``npu``.
        matrix: Version matrix; its sections ``cuda.system`` and ``npu.system`` name drivers and
            CANN.
    """
    if platform == "cpu":
        yield green(AREA, "none are needed: --platform cpu")
        return
    if not facts.devices:
        yield no_device_row(platform)
    else:
        yield from visible_rows(facts, platform)
    if facts.held:
        yield red(AREA, f"npu-smi: {HELD}", HELD_FIX)
    if platform == "cuda":
        yield from _gpu_driver_rows(facts, matrix["cuda.system"]["driver"])
    if platform == "npu":
        yield from _process_rows(facts)
        yield from _system_rows(facts, matrix["npu.system"])


def no_device_row(platform: str) -> DoctorRow:
    """Return the finding that a platform has no device nodes on this machine."""
    stem = "/dev/davinci*" if platform == "npu" else "/dev/nvidia*"
    device = "--device /dev/davinci0 ..." if platform == "npu" else "--gpus all"
    return red(AREA, f"no device of platform {platform} ({stem})",
               f"install the driver; in a container pass the devices ({device}); without any, "
               "use --platform cpu")  # fmt: skip


def visible_rows(facts: Facts, platform: str) -> Iterator[DoctorRow]:
    """Check which of the devices are visible, and that each rank of this node has one."""
    name, there = VISIBLE_DEVICES[platform], len(facts.devices)
    given = facts.environ.get(name)
    usable = there if given is None else len(given.split(","))
    every = ",".join(map(str, range(there)))
    if given is not None and (wrong := _wrong_list(given, there, platform)):
        yield red(AREA, f"{name}={given}: {wrong}",
                  f"unset {name}, or export {name}={every} or some of these")  # fmt: skip
    elif (ranks := local_size(facts.environ)) > usable:
        yield red(AREA, f"{counted(ranks, 'rank')} on this node and {usable} devices",
                  f"start torchrun with --nproc-per-node {usable}"
                  + (f", or change {name}" if given is not None else ""))  # fmt: skip
    else:
        yield green(
            AREA, f"{usable} of {there} devices are visible, {counted(ranks, 'rank')} on this node"
        )


def _wrong_list(given: str, there: int, platform: str) -> str:
    """Return what is wrong with a list of visible devices; empty if nothing is.

    CANN and torch_npu number the devices that this machine or container has from 0, read a list up
    to its first character that is neither digit nor comma or up to the first absent device, and
    see no device at all where the numbers do not ascend.
    """
    parts = [part.strip() for part in given.split(",")]
    if not given.strip():
        return f"no device is visible; there are {there}"
    if len(set(parts)) < len(parts):
        return "device numbers are needed, each once"
    if platform != "npu":  # GPUs may be given by UUID, and in any order
        return f"it names {len(parts)} devices; there are {there}" if len(parts) > there else ""
    if not re.fullmatch(r"\d+(,\d+)*", given):
        return "device numbers and commas are needed, nothing else"
    numbers = [int(part) for part in parts]
    if absent := [n for n in numbers if n >= there]:
        return f"it names device {absent[0]}; there are {there}, numbered from 0"
    return "" if numbers == sorted(numbers) else "the numbers must ascend"


def used_devices(facts: Facts) -> list[int]:
    """Return the numbers of the NPUs that the ranks of this node take."""
    given = facts.environ.get(VISIBLE_DEVICES["npu"])
    every = range(len(facts.devices))
    visible = [int(n) for n in re.findall(r"\d+", given)] if given is not None else list(every)
    return visible[: local_size(facts.environ)]


def other_processes(facts: Facts) -> list[DeviceProcess]:
    """Return the processes that use an NPU of this run's ranks: those with much memory."""
    used = used_devices(facts)
    return [one for one in facts.processes if one.device in used and one.mib >= SHARED_MIB]


def _numbers(version: str) -> list[int]:
    """The numbers of a driver's version, in order of weight."""
    return [int(number) for number in re.findall(r"\d+", version)]


def _gpu_driver_rows(facts: Facts, wanted: str) -> Iterator[DoctorRow]:
    """Compare the driver's kernel module with what the CUDA of the pinned torch needs."""
    if not facts.driver:
        return
    least = wanted.removeprefix(">=").strip()
    if _numbers(facts.driver) < _numbers(least):
        yield red(AREA, f"NVIDIA driver {facts.driver}, {least} or later is needed",
                  "update it on the host; on data-centre GPUs a container may have NVIDIA's "
                  "cuda-compat in its place")  # fmt: skip
    else:
        yield green(AREA, f"NVIDIA driver {facts.driver}")


def _process_rows(facts: Facts) -> Iterator[DoctorRow]:
    for one in other_processes(facts):
        what = (
            f"device {one.device} (NPU {one.board}, chip {one.chip}) is in use: process "
            f"{one.pid} ({one.name or 'name unknown'}) holds {one.mib} MiB"
        )
        if facts.environ.get(ALLOW_SHARED_DEVICES):
            yield note(AREA, f"{what}; {ALLOW_SHARED_DEVICES} is set")
        else:
            yield red(AREA, what, f"end that process, or choose others with "
                      f"{VISIBLE_DEVICES['npu']}; to share it, export "
                      f"{ALLOW_SHARED_DEVICES}=1")  # fmt: skip


def _system_rows(facts: Facts, pinned: Mapping[str, str]) -> Iterator[DoctorRow]:
    wrong = {row.what.partition(" ")[0]: row for row in wrong_system_rows(facts, pinned)}
    for name, key, fix in _SYSTEM:
        found, wanted = getattr(facts, key), pinned[key].removeprefix("==").strip()
        if not found:
            yield red(AREA, f"{name}: no version found, {wanted} is needed",
                      f"{fix}; in a container mount /usr/local/Ascend/driver")  # fmt: skip
        elif row := wrong.get(name.partition(" ")[0]):
            yield row
        elif key == "driver" and not _is(found, wanted):
            yield note(AREA, f"{name} {found} is later than {wanted}, which the other packages "
                       "were chosen with")  # fmt: skip
        else:
            yield green(AREA, f"{name} {found}")
    if facts.devices and not facts.soc:
        yield note(AREA, "npu-smi info does not say whether this is an A2 or an A3")


def wrong_system_rows(facts: Facts, pinned: Mapping[str, str]) -> Iterator[DoctorRow]:
    """Yield a red row for CANN and the driver if a version is found and does not fit.

    CANN belongs to torch_npu and vllm-ascend, so its version is exact. Of the driver torch_npu asks
    for least versions, so a later one fits.
    """
    for name, key, fix in _SYSTEM:
        found, wanted = getattr(facts, key), pinned[key].removeprefix("==").strip()
        if not found or _is(found, wanted):
            continue
        if key == "cann":
            yield red(AREA, f"{name} {found}, {wanted} is needed", fix)
        elif _order(found) < _order(wanted):
            yield red(AREA, f"{name} {found}, {wanted} or later is needed", fix)


def _is(found: str, wanted: str) -> bool:
    return found.lower().startswith(wanted.lower())


def _order(version: str) -> list[tuple[int, int]]:
    """Return what versions such as 25.5.0 and 26.0.rc1.1 are ordered by: rc before numbers."""
    parts = [re.fullmatch(r"(rc)?(\d+).*", part) for part in version.lower().split(".")]
    return [(int(part[1] is None), int(part[2])) if part else (-1, 0) for part in parts]
