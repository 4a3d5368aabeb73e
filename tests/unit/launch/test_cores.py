"""Which cores ranks run on, from trees of files and tables as machines have them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rl.core.cores import UNBOUND
from mindspeed_rl.launch import cores
from mindspeed_rl.launch.cores import HostCores, core_numbers, numa_nodes, plan_cores

# Eight NPUs of a machine with two sockets of four nodes; device 0 is not near node 0.
TOPOLOGY = """
\t   NPU0       NPU1       NPU2       NPU3       CPU Affinity
NPU0       X          HCCS       HCCS       HCCS       144-167
NPU1       HCCS       X          HCCS       HCCS       144-167
NPU2       HCCS       HCCS       X          HCCS       96-119
NPU3       HCCS       HCCS       HCCS       X          0-23

Legend:
  X    = Self
  NPU9 of another kind
"""


def tree(folder: Path, **nodes: str) -> Path:
    """A folder as /sys/devices/system/node, with what else is in there."""
    for name, text in nodes.items():
        (folder / name).mkdir()
        (folder / name / "cpulist").write_text(text + "\n")
    (folder / "power").mkdir()
    (folder / "online").write_text("0-1\n")
    return folder


def spans(*ends: tuple[int, int]) -> tuple[frozenset[int], ...]:
    return tuple(frozenset(range(first, last + 1)) for first, last in ends)


def test_lists_of_cores_are_read() -> None:
    assert core_numbers("0-3,8,10-11") == {0, 1, 2, 3, 8, 10, 11}
    assert core_numbers("7") == {7}
    assert not core_numbers("") and not core_numbers("SYS") and not core_numbers("0-")


def test_nodes_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """Node 10 after node 2; one with memory alone has no cores."""
    folder = tree(tmp_path, node10="8-11", node2="4-7", node0="0-3", node3="")
    assert numa_nodes(folder) == spans((0, 3), (4, 7), (8, 11))
    assert numa_nodes(tmp_path / "nothing") == ()


def test_cores_near_devices_are_read() -> None:
    near = cores.cores_near_devices(TOPOLOGY)
    assert near == dict(enumerate(spans((144, 167), (144, 167), (96, 119), (0, 23))))


def test_ranks_share_the_cores_near_their_devices() -> None:
    """Devices 2, 0 and 1 of a machine: both of a node get half of it."""
    near = cores.cores_near_devices(TOPOLOGY)
    host = HostCores(frozenset(range(192)), spans((0, 95), (96, 191)), near)
    plan = plan_cores(host, 3, [2, 0, 1])
    assert plan.cores == tuple(map(tuple, (range(96, 120), range(144, 156), range(156, 168))))
    assert "npu-smi" in plan.why


@pytest.mark.parametrize("devices", [[], [0, 1, 2, 7]])
def test_nodes_are_dealt_where_a_device_is_not_known(devices: list[int]) -> None:
    near = cores.cores_near_devices(TOPOLOGY)
    host = HostCores(frozenset(range(16)), spans((0, 7), (8, 15)), near)
    plan = plan_cores(host, 4, devices)
    assert plan.cores == tuple(map(tuple, (range(4), range(4, 8), range(8, 12), range(12, 16))))
    assert plan_cores(host, 2, []).cores == tuple(map(tuple, (range(8), range(8, 16))))
    assert plan_cores(host, 1, []).cores == (tuple(range(8)),)


def test_both_threads_of_a_core_go_to_one_rank() -> None:
    """Cores 0-7 of a node have their second threads at 16-23."""
    node = frozenset([*range(8), *range(16, 24)])
    plan = plan_cores(HostCores(frozenset(range(32)), (node,)), 2, [])
    assert plan.cores == ((0, 1, 2, 3, 16, 17, 18, 19), (4, 5, 6, 7, 20, 21, 22, 23))


@pytest.mark.parametrize("ranks", range(1, 13))
def test_every_core_that_is_allowed_has_one_rank(ranks: int) -> None:
    """A container has some cores of every node, in pieces; parts differ by one core at most."""
    allowed = frozenset(core for core in range(96) if core % 7 and not 30 <= core < 36)
    plan = plan_cores(HostCores(allowed, spans((0, 47), (48, 95))), ranks, [])
    taken = [core for part in plan.cores for core in part]
    assert len(taken) == len(set(taken)) and set(taken) <= allowed
    if ranks > 1:
        assert set(taken) == allowed
    if ranks % 2 == 0:
        half = [
            sorted(map(len, part)) for part in (plan.cores[: ranks // 2], plan.cores[ranks // 2 :])
        ]
        assert all(sizes[-1] - sizes[0] <= 1 for sizes in half)


@pytest.mark.parametrize(
    ("host", "ranks", "why"),
    [
        (HostCores(frozenset(range(8)), ()), 1, "no NUMA node"),
        (HostCores(frozenset({99}), spans((0, 7))), 1, "no NUMA node"),
        (HostCores(frozenset(range(8)), spans((0, 7))), 3, "fewer than 4"),
    ],
)
def test_nothing_is_bound_where_it_would_do_harm(host: HostCores, ranks: int, why: str) -> None:
    plan = plan_cores(host, ranks, [])
    assert not plan.cores and why in plan.why


@pytest.mark.parametrize(
    ("choice", "platform", "environ", "lines"),
    [
        ("auto", "cpu", {}, 0),
        ("none", "npu", {}, 0),
        ("auto", "npu", {"CPU_AFFINITY_CONF": "1"}, 1),
        ("numa", "cpu", {"LOCAL_WORLD_SIZE": "100000"}, 1),
    ],
)
def test_what_is_left_alone(
    choice: str, platform: str, environ: dict[str, str], lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "bind_process", lambda *_: pytest.fail("bound"))
    assert len(cores.bind_cores(choice, platform, environ)) == lines
    assert UNBOUND not in environ


def test_a_rank_is_bound_by_its_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rank 1 of two has device 3."""
    bound: list[Any] = []
    monkeypatch.setattr(cores, "_NODES", tree(tmp_path, node0="0-95", node1="96-191"))
    monkeypatch.setattr(cores, "device_topology", lambda _: TOPOLOGY)
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(range(192)))
    monkeypatch.setattr(cores, "bind_process", lambda *given: bound.append(given[0]))
    environ = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "ASCEND_RT_VISIBLE_DEVICES": "0,3"}
    (line,) = cores.bind_cores("auto", "npu", environ)
    assert bound == [tuple(range(24))] and "24 of 192" in line


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_children_that_release_themselves_have_all_cores_again() -> None:
    """A reward worker beside another child of a bound rank."""
    code = """if True:
        import json, os, subprocess, sys
        from mindspeed_rl.core.cores import bind_process
        before = sorted(os.sched_getaffinity(0))
        bind_process(before[-1:], os.environ)
        ask = "import json, os; print(json.dumps(sorted(os.sched_getaffinity(0))))"
        release = "from mindspeed_rl.core.cores import *; import os; release_process(os.environ);"
        found = [json.loads(subprocess.check_output([sys.executable, "-c", text]))
                 for text in (ask, release + ask)]
        print(json.dumps([before, *found]))
    """
    before, bound, released = json.loads(subprocess.check_output([sys.executable, "-c", code]))
    assert bound == before[-1:] and released == before
