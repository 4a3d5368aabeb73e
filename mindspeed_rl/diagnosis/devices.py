"""Checks devices, drivers and CANN of this node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mindspeed_rl.core.installed import VISIBLE_DEVICES
from mindspeed_rl.diagnosis.facts import Facts, local_size
from mindspeed_rl.diagnosis.rows import DoctorRow, green, note, red

AREA = "devices"


def device_rows(
    facts: Facts, platform: str, matrix: Mapping[str, Mapping[str, str]]
) -> Iterator[DoctorRow]:
    """Check the devices that ranks of this node can use.

    Args:
        facts: Facts of this machine.
        platform: ``cpu``, ``cuda`` or ``npu``.
        matrix: Version matrix; its section ``npu.system`` names CANN and driver.
    """
    if platform == "cpu":
        yield green(AREA, "none are needed: --platform cpu")
        return
    if not facts.devices:
        stem = "/dev/davinci*" if platform == "npu" else "/dev/nvidia*"
        device = "--device /dev/davinci0 ..." if platform == "npu" else "--gpus all"
        yield red(AREA, f"no device of platform {platform} ({stem})",
                  f"install the driver; in a container pass the devices ({device}); without any, "
                  "use --platform cpu")  # fmt: skip
    else:
        yield from _visible_rows(facts, platform)
    if platform == "npu":
        yield from _cann_rows(facts, matrix["npu.system"])


def _visible_rows(facts: Facts, platform: str) -> Iterator[DoctorRow]:
    name, there = VISIBLE_DEVICES[platform], len(facts.devices)
    given = facts.environ.get(name)
    parts = [part for part in (given or "").replace(" ", "").split(",") if part]
    usable = there if given is None else len(parts)
    named = not all(part.isdecimal() for part in parts)  # GPUs may be given by UUID
    if (named and platform == "npu") or len(set(parts)) < len(parts):
        yield red(AREA, f"{name}={given}: device numbers are needed, each once",
                  f"export {name}={','.join(map(str, range(there)))}")  # fmt: skip
    # A container has only the devices passed to it, under the host's numbers.
    elif len(parts) > there:
        yield red(AREA, f"{name}={given} names {len(parts)} devices; there are {there}",
                  f"unset {name}, or name only those of this machine")  # fmt: skip
    elif (ranks := local_size(facts.environ)) > usable:
        yield red(AREA, f"{ranks} ranks on this node and {usable} devices",
                  f"start torchrun with --nproc-per-node {usable}"
                  + (f", or change {name}" if given is not None else ""))  # fmt: skip
    else:
        yield green(AREA, f"{usable} of {there} devices are visible, {ranks} ranks on this node")


def _cann_rows(facts: Facts, pinned: Mapping[str, str]) -> Iterator[DoctorRow]:
    for name, found, key, fix in (
        ("CANN", facts.cann, "cann", "install that version of the toolkit, kernels and NNAL"),
        ("driver (HDK)", facts.driver, "driver", "install that version of driver and firmware"),
    ):
        wanted = pinned[key].removeprefix("==").strip()
        if not found:
            yield red(AREA, f"{name}: no version found, {wanted} is needed",
                      f"{fix}; in a container mount /usr/local/Ascend/driver")  # fmt: skip
        elif not found.lower().startswith(wanted.lower()):
            yield red(AREA, f"{name} {found}, {wanted} is needed", fix)
        else:
            yield green(AREA, f"{name} {found}")
    if facts.devices and not facts.soc:
        yield note(AREA, "npu-smi info does not say whether this is an A2 or an A3")
