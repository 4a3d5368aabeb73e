"""Refuses a machine on which a run cannot work, with the doctor's own findings.

What files can tell is looked at before torch is imported, because the wrong packages do not even
load; what only the driver can tell is asked when the devices are first used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.installed import (
    ALLOW_SHARED_DEVICES,
    ALLOW_VERSIONS,
    VISIBLE_DEVICES,
    resolve_platform,
)
from mindspeed_rl.core.versions import read_matrix
from mindspeed_rl.diagnosis.devices import (
    HELD,
    HELD_FIX,
    SHARED_MIB,
    no_device_row,
    visible_rows,
    wrong_system_rows,
)
from mindspeed_rl.diagnosis.facts import Facts, device_nodes, gather, local_size
from mindspeed_rl.diagnosis.packages import package_rows, pinned_rows
from mindspeed_rl.diagnosis.rows import DoctorRow, Status

if TYPE_CHECKING:
    from mindspeed_rl.platforms.base import Platform

TAKEN_BYTES = 4 * 2**30
"""Memory of a device that may be in use before a run: on NPUs contexts of the other ranks take
about 2 GiB of the first device."""
_OCCUPIED = 87  # the driver's code for devices that another container holds
_DRIVER = "mount it into the container: -v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro"
_SOURCE = "source /usr/local/Ascend/ascend-toolkit/set_env.sh (or .../cann/set_env.sh)"
# What CANN's codes mean where a device is opened, and what to do.
_CODES = {
    107001: ("no such device", "start no more ranks than devices on a node"),
    507033: ("the device does not start", "npu-smi info shows its health; reset or replace it"),
    507899: ("the driver refuses it", "npu-smi info shows what it says of the device"),
}


def check_machine(platform_name: str, environ: Mapping[str, str], *, engine: bool = True) -> None:
    """Check versions and devices of this node; on an NPU import torch and torch_npu. Local.

    Without ``engine`` the packages of an inference engine may be missing.

    Raises:
        UsageError: Versions do not belong together, a library does not load, or devices are
            missing. The message has every finding with its fix, in one line.
    """
    platform = resolve_platform(platform_name)
    if platform == "auto":
        if device_nodes("npu"):
            raise UsageError(
                "--platform auto: this machine has NPUs and no torch_npu; install it "
                "(docs/install.md, NPU), or use --platform cpu"
            )
        return  # torch knows whether there is CUDA
    facts = gather(platform, environ, ask_devices=False)
    _check_versions(platform, facts, engine)
    if platform != "npu":
        return
    if facts.devices:
        _refuse(visible_rows(facts, platform))
    import_torch_npu(environ)
    _check_count(facts)


def check_versions(platform: str, *, engine: bool = True) -> None:
    """Compare what is installed with the version matrix. Local; nothing is imported.

    Raises:
        UsageError: Some of it differs; the message names it and the commands that mend it.
    """
    _check_versions(platform, gather(platform, os.environ, ask_devices=False), engine)


def _check_versions(platform: str, facts: Facts, engine: bool) -> None:
    if facts.environ.get(ALLOW_VERSIONS):
        return
    matrix = read_matrix()
    if platform == "npu":
        rows = [*package_rows(facts, platform, matrix)]
        rows += wrong_system_rows(facts, matrix["npu.system"])
    else:
        rows = [*pinned_rows(facts, platform, matrix, engine=engine)]
    _refuse(
        rows,
        f"versions outside the matrix of {platform}: ",
        f"; or set {ALLOW_VERSIONS}=1 at your own risk",
    )


def _refuse(rows: Iterable[DoctorRow], before: str = "", after: str = "") -> None:
    found = [f"{row.what} ({row.fix})" for row in rows if row.status is Status.RED]
    if found:
        raise UsageError(before + "; ".join(found) + after)


def import_torch_npu(environ: Mapping[str, str]) -> None:
    """Import torch, then torch_npu, whose errors would otherwise break the import of torch.

    Raises:
        UsageError: torch_npu does not load; says why.
    """
    with _without_autoload():
        import torch  # noqa: F401
    try:
        import torch_npu  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        fix = "install the versions of mindspeed_rl/versions.cfg"
        if not (environ.get("ASCEND_TOOLKIT_HOME") or environ.get("ASCEND_HOME_PATH")):
            fix = _SOURCE
        elif "libascend_hal" in str(error):
            fix = f"the driver is not there; {_DRIVER}"
        raise UsageError(
            f"--platform npu: torch_npu does not load: {_first_line(error)}; {fix}; "
            "python -m mindspeed_rl.doctor --platform npu names what is missing"
        ) from error


@contextmanager
def _without_autoload() -> Iterator[None]:
    name = "TORCH_DEVICE_BACKEND_AUTOLOAD"
    given = os.environ.get(name)
    os.environ[name] = "0"
    yield
    if given is None:
        del os.environ[name]
    else:
        os.environ[name] = given


def _check_count(facts: Facts) -> None:
    """Check that CANN sees a device for each rank of this node.

    Raises:
        UsageError: It sees fewer; the message says why if npu-smi or the driver does.
    """
    from mindspeed_rl.platforms.npu import device_count, driver_code

    count, ranks = device_count(), local_size(facts.environ)
    if count >= ranks:
        return
    name = VISIBLE_DEVICES["npu"]
    if driver_code() == _OCCUPIED or gather("npu", facts.environ).held:
        raise UsageError(f"--platform npu: {HELD}; {HELD_FIX}")
    what = f"--platform npu: {ranks} ranks on this node, and CANN sees {count} devices"
    if (given := facts.environ.get(name)) is not None:
        raise UsageError(
            f"{what} with {name}={given}; unset it, or name a device for each rank, in ascending "
            "order and with nothing but commas between"
        )
    if count:
        raise UsageError(f"{what}; start torchrun with --nproc-per-node {count}")
    if not facts.devices:
        _refuse([no_device_row("npu")], "--platform npu: ")
    raise UsageError(f"{what} of {len(facts.devices)}; npu-smi info shows their state")


def bind_device(platform: Platform) -> None:
    """Bind this process to its device, which must be free. Local.

    Raises:
        UsageError: The device cannot be opened, or another process uses it.
    """
    if platform.name == "cpu":
        platform.set_device()
        return
    try:
        platform.set_device()
    except RuntimeError as error:
        what, fix = _refusal(platform, str(error))
        raise UsageError(
            f"device {platform.device.index}: {what} ({_first_line(error)}); {fix}"
        ) from error
    if platform.taken_bytes > TAKEN_BYTES and not os.environ.get(ALLOW_SHARED_DEVICES):
        raise UsageError(_in_use(platform))


def _refusal(platform: Platform, said: str) -> tuple[str, str]:
    """Return what it means that a device cannot be opened, and what to do."""
    if platform.name == "cuda":
        if "invalid device ordinal" in said:
            name = VISIBLE_DEVICES["cuda"]
            return "no such device", f"{_CODES[107001][1]}, or change {name}"
        return "it cannot be opened", "nvidia-smi shows its state"
    code = re.search(r"error code is (\d+)", said)
    known = _CODES.get(int(code[1]) if code else 0)
    return known or ("it cannot be opened", "npu-smi info shows its state")


def _in_use(platform: Platform) -> str:
    index, name = platform.device.index, VISIBLE_DEVICES[platform.name]
    visible = (os.environ.get(name) or "").split(",")
    number = visible[index].strip() if index < len(visible) and visible[index] else str(index)
    holders, tool = "", "nvidia-smi"
    if platform.name == "npu":
        tool = "npu-smi info"
        holders = ", ".join(
            f"process {one.pid} ({one.name or 'name unknown'}) with {one.mib} MiB"
            for one in gather("npu", os.environ).processes
            if str(one.device) == number and one.mib >= SHARED_MIB
        )
    return (
        f"device {number} is in use: {platform.taken_bytes / 2**30:.1f} GiB are taken before this "
        f"run, by {holders or f'processes that {tool} on the host may name'}; end "
        f"them, or choose others with {name}; to share it, export {ALLOW_SHARED_DEVICES}=1"
    )


def unused_devices(platform_name: str) -> list[str]:
    """Return a note where ``auto`` means the CPU on a machine with GPUs. Local; no torch."""
    if resolve_platform(platform_name) != "auto" or not device_nodes("cuda"):
        return []
    found = gather("cpu", {}, ask_devices=False).packages.get("torch", "")
    if not found.endswith("+cpu"):
        return []
    return [
        f"--platform auto is cpu: this machine has NVIDIA GPUs, and torch {found} is a build "
        "without CUDA (docs/install.md, CUDA)"
    ]


def _first_line(error: BaseException) -> str:
    return next(filter(None, (line.strip() for line in str(error).splitlines())), repr(error))
