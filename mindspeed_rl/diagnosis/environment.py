"""Checks environment variables, ports and interfaces against the needs of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from mindspeed_rl.diagnosis.facts import Facts
from mindspeed_rl.diagnosis.rows import DoctorRow, green, note, red
from mindspeed_rl.platforms.allocator_settings import without_expandable_segments

AREA = "environment"
CONNECT_TIMEOUT_S = 600
"""Least timeout: ranks leave rollouts of different lengths up to this much later than others."""
BASE_PORT, BASE_PORTS = 60000, 16
"""The first port on which HCCL listens by default on the host, and the number of its ports."""
_INTERFACES = {
    "npu": ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"),
    "cuda": ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
    "cpu": ("GLOO_SOCKET_IFNAME",),
}
_MIN_SHM_BYTES = 256 * 2**20
# Software whose environment must be loaded, variables that show that it is, and its script.
_SOURCED = (
    (
        "CANN",
        ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH"),
        "ascend-toolkit/set_env.sh, or cann/set_env.sh beside it",
    ),
    ("NNAL", ("ATB_HOME_PATH",), "nnal/atb/set_env.sh"),
)


def environment_rows(
    facts: Facts, platform: str, *, longest_phase_s: float, several_nodes: bool
) -> Iterator[DoctorRow]:
    """Yield rows for settings that do not fit; one green row if everything does.

    Args:
        facts: Facts of this machine; its environment includes the bootstrap's defaults.
        platform: ``cpu``, ``cuda`` or ``npu``.
        longest_phase_s: Value of ``--phase-timeout-s`` of the run.
        several_nodes: Whether the run has more than one node.
    """
    environ = facts.environ
    wrong = [*_network_rows(facts, platform, several_nodes)]
    if facts.shm_bytes is not None and facts.shm_bytes < _MIN_SHM_BYTES:
        what = f"/dev/shm has {facts.shm_bytes / 2**20:.0f} MiB; engines and reward workers share "
        fix = "start the container with --shm-size 16g"
        wrong.append(red(AREA, f"{what}memory through it", fix))
    queues = environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if platform != "cpu" and queues != "1":
        what = f"CUDA_DEVICE_MAX_CONNECTIONS={queues}: tensor parallelism relies on the order of "
        wrong.append(red(AREA, f"{what}one queue", "export CUDA_DEVICE_MAX_CONNECTIONS=1"))
    if platform == "npu":
        wrong += [*_npu_rows(environ), *_timeout_rows(environ, longest_phase_s)]
        wrong += _port_rows(facts)
    yield from wrong or [green(AREA, "variables, interfaces and ports are as a run needs them")]
    if platform != "cpu":
        for text in without_expandable_segments(dict(environ)):
            yield note(AREA, text)
    unset = [name for name in _INTERFACES[platform] if not environ.get(name)]
    if several_nodes and unset:
        yield note(AREA, f"{', '.join(unset)} not set: libraries choose an interface themselves",
                   "export each as the interface with the address of this node")  # fmt: skip


def _network_rows(facts: Facts, platform: str, several_nodes: bool) -> Iterator[DoctorRow]:
    for name in _INTERFACES[platform]:
        value = facts.environ.get(name, "")
        if not value or value.startswith("^"):  # ^ lists interfaces to avoid
            continue
        wanted = tuple(part.strip() for part in value.lstrip("=").split(","))
        if not all(any(i.startswith(w) for i in facts.interfaces) for w in wanted):
            there = ", ".join(sorted(facts.interfaces)) or "none"
            yield red(AREA, f"{name}={value}: no such network interface here (there are: {there})",
                      f"export {name}=<one of them>")  # fmt: skip
    address = facts.environ.get("MASTER_ADDR", "")
    if several_nodes and address in ("localhost", "127.0.0.1", "::1"):
        yield red(AREA, f"MASTER_ADDR={address} on several nodes: every node would wait for "
                  "itself", "export MASTER_ADDR=<address of the first node>, the same on all "
                  "nodes")  # fmt: skip


def _npu_rows(environ: Mapping[str, str]) -> Iterator[DoctorRow]:
    for library, names, script in _SOURCED:
        if not any(environ.get(name) for name in names):
            yield red(AREA, f"{library}'s environment is not loaded ({names[0]} is not set)",
                      f"source /usr/local/Ascend/{script}")  # fmt: skip
    if (given := environ.get("VLLM_ASCEND_ENABLE_NZ", "0")) != "0":
        yield red(AREA, f"VLLM_ASCEND_ENABLE_NZ={given}: weight updates write the plain format, "
                  "not NZ", "export VLLM_ASCEND_ENABLE_NZ=0")  # fmt: skip
    size = environ.get("HCCL_BUFFSIZE", "200")
    if _number(size) <= 0:
        yield red(AREA, f"HCCL_BUFFSIZE={size}: a whole number of MiB is needed",
                  "export HCCL_BUFFSIZE=200")  # fmt: skip
    queue = environ.get("TASK_QUEUE_ENABLE", "1")
    if queue == "0":
        yield red(AREA, "TASK_QUEUE_ENABLE=0: torch_npu then gives no cached memory back, so that "
                  "the engine finds none", "export TASK_QUEUE_ENABLE=1")  # fmt: skip
    elif queue == "2":
        yield note(AREA, "TASK_QUEUE_ENABLE=2 is faster in training and broke rollouts of others",
                   "export TASK_QUEUE_ENABLE=1 when generation fails")  # fmt: skip


def _timeout_rows(environ: Mapping[str, str], longest_phase_s: float) -> Iterator[DoctorRow]:
    for name, least, why in (
        ("HCCL_CONNECT_TIMEOUT", CONNECT_TIMEOUT_S, "ranks that wait in a rollout connect late"),
        ("HCCL_EXEC_TIMEOUT", longest_phase_s, "--phase-timeout-s is how long a phase may take"),
    ):
        value = environ.get(name, "not set")
        endless = name == "HCCL_EXEC_TIMEOUT" and value == "0"
        if _number(value) < least and not endless:
            yield red(AREA, f"{name}={value}: {why}, so at least {least:.0f} s",
                      f"export {name}={least:.0f}")  # fmt: skip


def _port_rows(facts: Facts) -> Iterator[DoctorRow]:
    environ = facts.environ
    for name in ("HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE"):
        if port_set(value := environ.get(name, "auto")) is None:
            yield red(AREA, f"{name}={value}: not ports and ranges of 1024 to 65535",
                      f"export {name}=60000-60050, or auto")  # fmt: skip
    base = environ.get("HCCL_IF_BASE_PORT", str(BASE_PORT))
    if not 1024 <= _number(base) <= 65520:
        yield red(AREA, f"HCCL_IF_BASE_PORT={base}: 1024 to 65520",
                  f"export HCCL_IF_BASE_PORT={BASE_PORT}")  # fmt: skip
    listened = set(range(_number(base), _number(base) + BASE_PORTS))
    if given := environ.get("HCCL_HOST_SOCKET_PORT_RANGE"):
        listened = port_set(given) or set()
    if taken := sorted(listened & facts.ports):
        yield red(AREA, f"ports {', '.join(map(str, taken[:5]))} that HCCL would listen on are "
                  "taken on this host", "export HCCL_IF_BASE_PORT=<16 free ports>, or "
                  "HCCL_HOST_SOCKET_PORT_RANGE=auto; or end what holds them")  # fmt: skip
    if _number(environ.get("MASTER_PORT", "")) in listened:
        yield red(AREA, f"MASTER_PORT={environ['MASTER_PORT']} is one of the ports of HCCL",
                  "export MASTER_PORT=6000, or move HCCL_IF_BASE_PORT")  # fmt: skip


def port_set(text: str) -> set[int] | None:
    """Return the ports of ``60000,60050-60100``, none for ``auto``, ``None`` for invalid lists."""
    ports: set[int] = set()
    for part in text.split(",") if text != "auto" else ():
        found = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if not found:
            return None
        first, last = int(found[1]), int(found[2] or found[1])
        new = set(range(first, last + 1))
        if not 1024 <= first <= last <= 65535 or new & ports:
            return None
        ports |= new
    return ports


def _number(text: str) -> int:
    """Return a whole number from text; -1 for anything else."""
    return int(text) if text.strip().isdecimal() else -1
