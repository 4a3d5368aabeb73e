"""Environment variables, ports and interfaces against what a run needs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from mindspeed_rl.diagnosis.facts import Facts
from mindspeed_rl.diagnosis.rows import DoctorRow, green, note, red
from mindspeed_rl.platforms.allocator_settings import without_expandable_segments

AREA = "environment"
CONNECT_TIMEOUT_S = 600
"""Ranks that come out of rollouts of unlike length meet this late."""
BASE_PORT, BASE_PORTS = 60000, 16
"""Where HCCL listens on the host unless it is told, and on how many ports."""
_INTERFACES = {
    "npu": ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"),
    "cuda": ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
    "cpu": ("GLOO_SOCKET_IFNAME",),
}
_MIN_SHM_BYTES = 256 * 2**20


def environment_rows(
    facts: Facts, platform: str, *, longest_phase_s: float, several_nodes: bool
) -> Iterator[DoctorRow]:
    """What is set and does not fit.

    Args:
        facts: of this machine; its environment with the bootstrap's defaults.
        platform: ``cpu``, ``cuda`` or ``npu``.
        longest_phase_s: ``--phase-timeout-s`` of the run.
        several_nodes: whether the run has more than one.
    """
    environ = facts.environ
    yield from _interface_rows(facts, platform, several_nodes)
    yield from _address_rows(environ, several_nodes)
    if facts.shm_bytes is not None and facts.shm_bytes < _MIN_SHM_BYTES:
        yield red(AREA, f"/dev/shm has {facts.shm_bytes / 2**20:.0f} MiB; engines and reward "
                  "workers share memory through it",
                  "start the container with --shm-size 16g")  # fmt: skip
    if platform == "cpu":
        return
    yield from _allocator_rows(environ)
    if environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1") != "1":
        yield red(AREA, "CUDA_DEVICE_MAX_CONNECTIONS="
                  f"{environ['CUDA_DEVICE_MAX_CONNECTIONS']}: tensor parallelism relies on the "
                  "order of one queue", "export CUDA_DEVICE_MAX_CONNECTIONS=1")  # fmt: skip
    if platform == "npu":
        yield from _hccl_rows(facts, longest_phase_s)
        yield from _npu_rows(environ)


def _interface_rows(facts: Facts, platform: str, several_nodes: bool) -> Iterator[DoctorRow]:
    for name in _INTERFACES[platform]:
        value = facts.environ.get(name, "")
        if not value:
            if several_nodes:
                yield note(AREA, f"{name} is not set: the library takes an interface by itself",
                           f"export {name}=<the one with the address of this node>")  # fmt: skip
            continue
        wanted = [part.strip() for part in value.lstrip("^=").split(",")]
        missing = [w for w in wanted if not any(i.startswith(w) for i in facts.interfaces)]
        if missing and not value.startswith("^"):
            there = ", ".join(sorted(facts.interfaces)) or "none"
            yield red(AREA, f"{name}={value}: no such network interface here (there are: {there})",
                      f"export {name}=<one of them>")  # fmt: skip
        else:
            yield green(AREA, f"{name}={value}")


def _address_rows(environ: Mapping[str, str], several_nodes: bool) -> Iterator[DoctorRow]:
    address = environ.get("MASTER_ADDR", "")
    if several_nodes and address in ("localhost", "127.0.0.1", "::1"):
        yield red(AREA, f"MASTER_ADDR={address} on several nodes: every node would wait for "
                  "itself", "export MASTER_ADDR=<address of the first node>, the same on all "
                  "nodes")  # fmt: skip


def _allocator_rows(environ: Mapping[str, str]) -> Iterator[DoctorRow]:
    for text in without_expandable_segments(dict(environ)):
        yield note(AREA, text)


def _hccl_rows(facts: Facts, longest_phase_s: float) -> Iterator[DoctorRow]:
    environ = facts.environ
    for name, least, why in (
        ("HCCL_CONNECT_TIMEOUT", CONNECT_TIMEOUT_S, "ranks that wait in a rollout connect late"),
        ("HCCL_EXEC_TIMEOUT", longest_phase_s, "--phase-timeout-s is how long a phase may take"),
    ):
        value = environ.get(name, "")
        number = _number(value)
        # 0 is "no limit" for the second one
        endless = name == "HCCL_EXEC_TIMEOUT" and number == 0
        if number is None or (number < least and not endless):
            yield red(AREA, f"{name}={value or 'not set'}: {why}, so at least {least:.0f} s",
                      f"export {name}={least:.0f}")  # fmt: skip
        else:
            yield green(AREA, f"{name}={value}")
    size = environ.get("HCCL_BUFFSIZE", "200")
    if not _number(size):
        yield red(AREA, f"HCCL_BUFFSIZE={size}: a whole number of MiB is needed",
                  "export HCCL_BUFFSIZE=200")  # fmt: skip
    else:
        yield green(AREA, f"HCCL_BUFFSIZE={size}: 2 x {size} MiB of device memory per used group")
    yield from _port_rows(facts)


def _port_rows(facts: Facts) -> Iterator[DoctorRow]:
    environ = facts.environ
    used: dict[str, set[int]] = {}
    for name in ("HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE"):
        value = environ.get(name, "")
        if not value or value == "auto":
            continue
        ports = port_set(value)
        if ports is None:
            yield red(AREA, f"{name}={value}: not ports and ranges of 1024 to 65535",
                      f"export {name}=60000-60050, or auto")  # fmt: skip
            continue
        used[name] = ports
    host = used.get("HCCL_HOST_SOCKET_PORT_RANGE")
    if host is None and environ.get("HCCL_HOST_SOCKET_PORT_RANGE") != "auto":
        base = _number(environ.get("HCCL_IF_BASE_PORT", str(BASE_PORT)))
        if base is None or not 1024 <= base <= 65520:
            yield red(AREA, f"HCCL_IF_BASE_PORT={environ.get('HCCL_IF_BASE_PORT')}: 1024 to 65520",
                      f"export HCCL_IF_BASE_PORT={BASE_PORT}")  # fmt: skip
            return
        host = set(range(base, base + BASE_PORTS))
    taken = sorted((host or set()) & facts.ports)
    if taken:
        yield red(AREA, f"ports {', '.join(map(str, taken[:5]))} that HCCL would listen on are "
                  "taken on this host", "export HCCL_IF_BASE_PORT=<16 free ports>, or "
                  "HCCL_HOST_SOCKET_PORT_RANGE=auto; or end what holds them")  # fmt: skip
    master = _number(environ.get("MASTER_PORT", "0")) or 0
    if master and master in (host or set()):
        yield red(AREA, f"MASTER_PORT={master} is one of the ports of HCCL",
                  "export MASTER_PORT=6000, or move HCCL_IF_BASE_PORT")  # fmt: skip
    if not taken:
        yield green(AREA, "HCCL's ports on this host are free")


def _npu_rows(environ: Mapping[str, str]) -> Iterator[DoctorRow]:
    if not environ.get("ASCEND_TOOLKIT_HOME") and not environ.get("ASCEND_HOME_PATH"):
        yield red(AREA, "CANN's environment is not loaded (ASCEND_TOOLKIT_HOME is not set)",
                  "source /usr/local/Ascend/ascend-toolkit/set_env.sh")  # fmt: skip
    if not environ.get("ATB_HOME_PATH"):
        yield red(AREA, "NNAL's environment is not loaded (ATB_HOME_PATH is not set); vllm-ascend "
                  "needs libatb.so", "source /usr/local/Ascend/nnal/atb/set_env.sh")  # fmt: skip
    queue = environ.get("TASK_QUEUE_ENABLE", "1")
    if queue == "0":
        yield red(AREA, "TASK_QUEUE_ENABLE=0: torch_npu then gives no cached memory back, so that "
                  "the engine finds none", "export TASK_QUEUE_ENABLE=1")  # fmt: skip
    elif queue == "2":
        yield note(AREA, "TASK_QUEUE_ENABLE=2 is faster in training and broke rollouts of others",
                   "export TASK_QUEUE_ENABLE=1 when generation fails")  # fmt: skip
    else:
        yield green(AREA, f"TASK_QUEUE_ENABLE={queue}")
    if environ.get("VLLM_ASCEND_ENABLE_NZ", "0") != "0":
        yield red(AREA, f"VLLM_ASCEND_ENABLE_NZ={environ['VLLM_ASCEND_ENABLE_NZ']}: weight updates "
                  "write the plain format, not NZ", "export VLLM_ASCEND_ENABLE_NZ=0")  # fmt: skip


def port_set(text: str) -> set[int] | None:
    """Ports of ``60000,60050-60100``; ``None``: not of that form, or overlapping."""
    ports: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if not found:
            return None
        first, last = int(found[1]), int(found[2] or found[1])
        new = set(range(first, last + 1))
        if not 1024 <= first <= last <= 65535 or new & ports:
            return None
        ports |= new
    return ports


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None
