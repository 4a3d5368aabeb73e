"""Binds each rank of a node to cores near its device (``--bind-cores``).

A rank whose threads move between NUMA nodes reads its memory from afar. Ranks get equal parts of
the cores of their home: where ``npu-smi`` says which cores are near each device, these; else the
NUMA nodes are dealt to the ranks in order.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from mindspeed_rl.core.cores import bind_process
from mindspeed_rl.core.installed import VISIBLE_DEVICES, resolve_platform
from mindspeed_rl.diagnosis.facts import device_topology, local_size

LEAST = 4
"""Cores that a rank needs at least: Python, its watchdog, and two threads of the device."""
_NODES = Path("/sys/devices/system/node")
_TORCH_NPU = "CPU_AFFINITY_CONF"  # lets torch_npu bind the threads of a process itself


@dataclass(frozen=True, slots=True)
class HostCores:
    """The cores of a node of the cluster.

    Attributes:
        allowed: Cores on which this process may run.
        nodes: Cores of each NUMA node, in the order of their numbers.
        near: Cores near a device, by the number of the device; empty where it is not known.
    """

    allowed: frozenset[int]
    nodes: tuple[frozenset[int], ...]
    near: Mapping[int, frozenset[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CorePlan:
    """The cores of each rank of this node.

    Attributes:
        cores: Cores by local rank; empty when ranks are not bound.
        why: By what they were chosen, or why there are none.
    """

    cores: tuple[tuple[int, ...], ...]
    why: str


def core_numbers(text: str) -> frozenset[int]:
    """Return the numbers of a list like ``0-3,8``; empty for another text or none."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        return frozenset()
    ends = (part.split("-") for part in text.split(","))
    return frozenset(core for end in ends for core in range(int(end[0]), int(end[-1]) + 1))


def numa_nodes(folder: Path) -> tuple[frozenset[int], ...]:
    """Return the cores of each NUMA node of Linux's ``/sys/devices/system/node``."""
    files = [file for file in folder.glob("node*/cpulist") if file.parent.name[4:].isdigit()]
    files.sort(key=lambda file: int(file.parent.name[4:]))
    return tuple(filter(None, (core_numbers(file.read_text().strip()) for file in files)))


def cores_near_devices(topology: str) -> dict[int, frozenset[int]]:
    """Return the cores near each NPU, from what ``npu-smi info -t topo`` prints.

    A row begins with the name of an NPU and ends with its cores.
    """
    rows = re.findall(r"^\s*NPU(\d+)\b.*\s(\S+)\s*$", topology, re.MULTILINE)
    return {int(device): cores for device, text in rows if (cores := core_numbers(text))}


def plan_cores(host: HostCores, ranks: int, devices: Sequence[int]) -> CorePlan:
    """Divide the cores of a node among its ranks. Pure.

    Args:
        host: Its cores.
        ranks: Number of ranks of the node.
        devices: Number of the device of each rank; empty where it is not known.
    """
    nodes = [cores for node in host.nodes if (cores := node & host.allowed)]
    if not nodes:
        return CorePlan((), f"{_NODES} names no NUMA node of this machine")
    near = [host.near.get(device, frozenset()) & host.allowed for device in devices[:ranks]]
    if len(near) == ranks and all(near):
        homes, why = near, "near their devices, as npu-smi says"
    else:
        homes = [nodes[rank * len(nodes) // ranks] for rank in range(ranks)]
        why = f"{len(nodes)} NUMA nodes in order"
    residents: dict[frozenset[int], list[int]] = defaultdict(list)
    for rank, home in enumerate(homes):
        residents[home].append(rank)
    parts: dict[int, tuple[int, ...]] = {}
    for home, group in residents.items():
        parts |= zip(group, _parts(home, len(group)), strict=True)
    least = min(map(len, parts.values()))
    if least < LEAST:
        return CorePlan((), f"a rank of {ranks} would have {least} cores, fewer than {LEAST}")
    return CorePlan(tuple(parts[rank] for rank in range(ranks)), why)


def _parts(cores: frozenset[int], count: int) -> list[tuple[int, ...]]:
    """Divide cores into equal parts.

    Of each run of consecutive numbers a part gets its share: the second threads of the cores of a
    node are a run of their own, and stay with the first ones.
    """
    ordered = sorted(cores)
    runs = [
        [core for _, core in run] for _, run in groupby(enumerate(ordered), lambda x: x[1] - x[0])
    ]
    if any(len(run) % count for run in runs):
        runs = [ordered]
    return [
        tuple(c for run in runs for c in run[i * len(run) // count : (i + 1) * len(run) // count])
        for i in range(count)
    ]


def bind_cores(choice: str, platform: str, environ: MutableMapping[str, str]) -> list[str]:
    """Bind this rank as ``--bind-cores`` says, before it starts threads. Local.

    Args:
        choice: Value of the flag.
        platform: Value of ``--platform``.
        environ: Environment, in which the cores before are noted for children.

    Returns:
        A line about what was done, or why nothing was; none where nothing is asked for.
    """
    platform = resolve_platform(platform)
    if choice == "none" or (choice == "auto" and platform != "npu"):
        return []
    if environ.get(_TORCH_NPU, "0") not in ("", "0"):
        return [f"--bind-cores: {_TORCH_NPU}={environ[_TORCH_NPU]} lets torch_npu bind threads"]
    if not hasattr(os, "sched_setaffinity"):
        return ["--bind-cores: this system cannot bind a process; ranks run on all cores"]
    near = cores_near_devices(device_topology(environ)) if platform == "npu" else {}
    host = HostCores(frozenset(os.sched_getaffinity(0)), numa_nodes(_NODES), near)
    ranks, rank = local_size(environ), int(environ.get("LOCAL_RANK", "0"))
    plan = plan_cores(host, ranks, _devices(environ, platform, ranks))
    if not plan.cores:
        return [f"--bind-cores: {plan.why}; ranks run on all cores"]
    bind_process(plan.cores[rank], environ)
    return [
        f"--bind-cores: {len(plan.cores[rank])} of {len(host.allowed)} cores for each rank, "
        f"{plan.why}"
    ]


def _devices(environ: Mapping[str, str], platform: str, ranks: int) -> list[int]:
    """Return the numbers of the devices of the ranks of this node; empty where they are names."""
    given = environ.get(VISIBLE_DEVICES.get(platform, ""))
    if given is None:
        return list(range(ranks))
    names = [name.strip() for name in given.split(",")]
    return [int(name) for name in names] if all(map(str.isdigit, names)) else []
