"""A place for every rank in a Ray cluster, and the environment that makes it a rank.

A node gets one bundle of a placement group, which holds all its ranks: who is a neighbour of whom
does not depend on how Ray packs. Ray hands out devices but does not hide them: as under torchrun a
rank sees all devices of its job on its node and takes that of its ``LOCAL_RANK``, because
neighbours on a node map each other's memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mindspeed_rl.config.launch import LaunchConfig
from mindspeed_rl.platforms.installed import resolve_platform
from mindspeed_rl.rewards.worker_process import worker_environment

START_LIMIT_S = 300.0  # until all bundles are there: other jobs of the cluster may end
OBJECT_STORE_BYTES = 80 << 20  # the least that Ray accepts; control messages do not use it
_LOCAL_IP = "127.0.0.1"

# Resource of a device in Ray, and the variable that says which of them a process sees.
DEVICES: Mapping[str, tuple[str, str]] = {
    "npu": ("NPU", "ASCEND_RT_VISIBLE_DEVICES"),
    "cuda": ("GPU", "CUDA_VISIBLE_DEVICES"),
}
# What libraries read of the environment goes along: the nodes of a cluster have their own.
_FORWARDED = (
    "ASCEND_", "CPU_AFFINITY", "CUDA_", "GLOO_", "HCCL_", "HF_", "LCCL_", "MINDSPEED_", "NCCL_",
    "OMP_", "PYTORCH_", "TASK_QUEUE_", "TORCH_", "TRANSFORMERS_", "VLLM_",
)  # fmt: skip
_VISIBLE = frozenset(variable for _, variable in DEVICES.values())
_SECRET = ("_TOKEN", "_KEY", "_SECRET", "_PASSWORD")  # Ray shows what it is given
_RAY_SETTINGS = {
    "RAY_DEDUP_LOGS": "0",  # equal lines of two ranks are two lines
    "RAY_COLOR_PREFIX": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@dataclass(frozen=True, slots=True)
class Where:
    """Where an actor runs.

    Attributes:
        node: Ray's name of the node.
        pid: process id on it.
        devices: ids that Ray gave to the actor, one or none.
    """

    node: str
    pid: int
    devices: tuple[str, ...] = ()


def import_ray() -> Any:
    """The package, told what it reads when it is imported.

    Raises:
        ValueError: it is not installed.
    """
    for name, value in _RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise ValueError(
            "--orchestrator ray needs the package ray: install the extra, "
            "pip install 'mindspeed-rl-megatron[ray]', or start the ranks with torchrun"
        ) from error
    return ray


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """What of this process's environment every worker gets; all that is set before it starts."""
    found = {
        name: value
        for name, value in environ.items()
        if name.startswith(_FORWARDED)
        and name not in _VISIBLE
        and not name.upper().endswith(_SECRET)
    }
    found["PYTHONPATH"] = worker_environment(environ)["PYTHONPATH"]
    found.setdefault("OMP_NUM_THREADS", "1")  # Ray would set it to the CPUs of the actor
    return found


@contextmanager
def cluster(launch: LaunchConfig, num_cpus: int) -> Iterator[Any]:
    """Join ``--ray-address``, or start a Ray of one node with ``num_cpus`` and stop it at the end.

    Yields:
        The module ray, connected.

    Raises:
        ValueError: there is no cluster at the address.
    """
    ray = import_ray()
    address = launch.ray_address or os.environ.get("RAY_ADDRESS", "")
    variables = forwarded(os.environ)
    variables |= {f"RAY_EXPERIMENTAL_NOSET_{name}": "1" for name in sorted(_VISIBLE)}
    common = {
        "runtime_env": {"env_vars": variables},
        "logging_level": logging.WARNING,
        "log_to_driver": True,
    }
    if not address:
        ray.init(
            address="local", num_cpus=num_cpus, include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES, _node_ip_address=_LOCAL_IP, **common,
        )  # fmt: skip
    else:
        try:
            ray.init(address=address, **common)
        except (ConnectionError, TimeoutError) as error:
            raise ValueError(
                f"--ray-address {address}: no Ray cluster answers there ({error}); start one with "
                "ray start --head, or leave the address out for a local Ray"
            ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def device_of(platform: str, resources: Mapping[str, float]) -> tuple[str, str] | None:
    """Ray's resource and the variable of a platform's devices; ``None`` on CPUs.

    ``resources``: of the cluster; they decide for ``auto``, since this node may have no device.
    """
    platform = resolve_platform(platform)
    if platform == "auto":
        platform = next((p for p, (name, _) in DEVICES.items() if resources.get(name)), "cpu")
    return DEVICES.get(platform)


def bundle(launch: LaunchConfig, device: tuple[str, str] | None) -> dict[str, float]:
    """What the ranks of a node take of it."""
    count = float(launch.ray_ranks_per_node)
    return {"CPU": count} | ({device[0]: count} if device else {})


def check_room(
    launch: LaunchConfig, wanted: Mapping[str, float], nodes: Sequence[Mapping[str, float]]
) -> None:
    """Whether enough nodes are large enough, however busy they are now.

    Args:
        launch: the flags.
        wanted: of a node.
        nodes: resources of every living node.

    Raises:
        ValueError: there will never be room.
    """
    fit = sum(all(node.get(k, 0.0) >= v for k, v in wanted.items()) for node in nodes)
    if fit >= launch.ray_num_nodes:
        return
    has = "; ".join(
        ", ".join(f"{node.get(name, 0.0):g} {name}" for name in wanted) for node in nodes
    )
    needs = ", ".join(f"{value:g} {name}" for name, value in wanted.items())
    raise ValueError(
        f"--ray-num-nodes {launch.ray_num_nodes} --ray-ranks-per-node {launch.ray_ranks_per_node} "
        f"needs {needs} on each of {launch.ray_num_nodes} nodes; the cluster has {has}"
    )


def reserve(ray: Any, launch: LaunchConfig, device: tuple[str, str] | None) -> Any:
    """A placement group of one bundle per node.

    Raises:
        ValueError: the cluster has no room, or none became free.
    """
    wanted = bundle(launch, device)
    check_room(launch, wanted, [n["Resources"] for n in ray.nodes() if n["Alive"]])
    group = ray.util.placement_group([wanted] * launch.ray_num_nodes, strategy="STRICT_SPREAD")
    if not group.wait(START_LIMIT_S):
        ray.util.remove_placement_group(group)
        raise ValueError(
            f"--ray-num-nodes {launch.ray_num_nodes} --ray-ranks-per-node "
            f"{launch.ray_ranks_per_node}: no room became free in {START_LIMIT_S:.0f} s; end other "
            "jobs of the cluster (ray status shows what is in use)"
        )
    return group


def actor_options(
    ray: Any, group: Any, node: int, device: tuple[str, str] | None
) -> dict[str, Any]:
    """Options of a rank's actor in the bundle of a node."""
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=node
    )
    options: dict[str, Any] = {
        "num_cpus": 1,
        "max_restarts": 0,
        "max_task_retries": 0,
        "scheduling_strategy": strategy,
    }
    if device and device[0] == "GPU":
        options["num_gpus"] = 1
    elif device:
        options["resources"] = {device[0]: 1}
    return options


def rank_environments(
    found: Sequence[Where], ranks_per_node: int, endpoint: tuple[str, int], variable: str = ""
) -> list[dict[str, str]]:
    """What torchrun would have set for each rank.

    Args:
        found: where the actor of each rank runs.
        ranks_per_node: of every node.
        endpoint: host and port of the store, which the driver holds.
        variable: which devices a process sees; empty on CPUs.
    """
    result = []
    for rank in range(len(found)):
        node, local = divmod(rank, ranks_per_node)
        here = found[node * ranks_per_node : (node + 1) * ranks_per_node]
        assert len({place.node for place in here}) == 1, f"node {node} is several: {here}"
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(found)),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(ranks_per_node),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(len(found) // ranks_per_node),
            "MASTER_ADDR": endpoint[0],
            "MASTER_PORT": str(endpoint[1]),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        if variable:
            devices = sorted((d for place in here for d in place.devices), key=_device_order)
            environment[variable] = ",".join(devices)
        result.append(environment)
    return result


def _device_order(device: str) -> tuple[int, str]:
    return (int(device), "") if device.isdecimal() else (1 << 30, device)
