"""``--orchestrator ray``: Ray starts, places and watches the same ranks that torchrun would.

One process drives a run. A node of the cluster gets one bundle of a placement group, which holds an
actor per rank; each sets the environment that torchrun would have set and runs the entry to its
end. Like torchrun's agent the driver holds the store in which ranks meet and publish failures, so
that it knows of one as soon as they do; whatever ends first ends all actors.

Ray hands out devices but does not hide them: as under torchrun a rank sees all devices of its job
on its node and takes that of its ``LOCAL_RANK``, because neighbours map each other's memory.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.config.arguments import parse
from mindspeed_rl.config.launch import LaunchConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.installed import resolve_platform
from mindspeed_rl.launch import bootstrap
from mindspeed_rl.launch.failures import (
    USAGE_ERROR,
    Failure,
    Member,
    WatchdogLimits,
    lost_failure,
)
from mindspeed_rl.launch.job import Checked, check_run, run_job
from mindspeed_rl.planning.run_plan import RLPlan, check_rl
from mindspeed_rl.rewards.worker_process import worker_environment

if TYPE_CHECKING:
    from mindspeed_rl.launch.failure_store import FailureStore

MAIN = "mindspeed_rl.train_rl:main"
START_LIMIT_S = 300.0  # until all bundles are there: other jobs of the cluster may end
POLL_S = 0.2  # how late a failure may be noticed
EXIT_S = 10.0  # of the exit handlers of the ranks
LOGS_S = 1.0  # for the last lines of the ranks to arrive
OBJECT_STORE_BYTES = 80 << 20  # the least that Ray accepts; ranks send each other nothing by it

# Resource of a device in Ray, and the variable that says which of them a process sees.
DEVICES: Mapping[str, tuple[str, str]] = {
    "npu": ("NPU", "ASCEND_RT_VISIBLE_DEVICES"),
    "cuda": ("GPU", "CUDA_VISIBLE_DEVICES"),
}
_VISIBLE = frozenset(variable for _, variable in DEVICES.values())
# What libraries read of the environment goes along: the nodes of a cluster have their own.
_FORWARDED = (
    "ASCEND_", "CPU_AFFINITY", "CUDA_", "GLOO_", "HCCL_", "HF_", "LCCL_", "MINDSPEED_", "NCCL_",
    "OMP_", "PYTORCH_", "TASK_QUEUE_", "TORCH_", "TRANSFORMERS_", "VLLM_",
)  # fmt: skip
_SECRET = ("_TOKEN", "_KEY", "_SECRET", "_PASSWORD")  # Ray shows what it is given
_RAY_SETTINGS = {
    "RAY_DEDUP_LOGS": "0",  # equal lines of two ranks are two lines
    "RAY_COLOR_PREFIX": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


class RunFailed(Exception):
    """A rank has failed."""

    def __init__(self, failure: Failure, *, published: bool) -> None:
        super().__init__(str(failure))
        self.failure = failure
        self.published = published  # other ranks know of it and end by themselves


# -- a rank ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ActorPlace:
    """Where an actor runs: Ray's name of the node, and the ids of its devices, one or none."""

    node: str
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Order:
    """What a rank runs.

    Attributes:
        prog: of messages.
        arguments: the command line.
        environment: what makes this process a rank.
        folder: of relative paths.
        main: ``module:function`` of the work.
        limits: of the watchdog's waiting.
    """

    prog: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    folder: str
    main: str
    limits: WatchdogLimits


class RankActor:
    """One rank: the same process as under torchrun."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __repr__(self) -> str:
        return f"rank {self._rank}"  # Ray labels lines of output with it

    def place(self) -> ActorPlace:
        """Its node and devices."""
        import ray

        context = ray.get_runtime_context()
        devices = tuple(i for ids in context.get_accelerator_ids().values() for i in ids)
        return ActorPlace(context.get_node_id(), devices)

    def run(self, order: Order) -> str:
        """Be a rank until the end of the run; ends the process when that fails.

        Returns:
            A mistake of the user that was found before ranks meet; else nothing. Collective: the
            world.
        """
        os.environ.update(order.environment)
        try:
            _enter(order.folder)
            parsed = parse(RLRunConfig, list(order.arguments), order.prog)
            world = bootstrap.World.from_environment()
            checked = check_run(parsed, check_rl, world.size)
        except UsageError as error:
            return str(error)
        module, _, function = order.main.partition(":")
        main = getattr(importlib.import_module(module), function)
        run_job(order.prog, checked, world, main, order.limits, driver_reports=True)
        return ""


def _enter(folder: str) -> None:
    try:
        os.chdir(folder)
    except OSError as error:
        raise UsageError(
            f"node {os.environ['GROUP_RANK']} cannot enter {folder} ({error.strerror}), the folder "
            "of the command: every node must see it"
        ) from None


# -- the driver ------------------------------------------------------------------------------------


def drive(
    prog: str,
    checked: Checked[RLRunConfig, RLPlan],
    arguments: Sequence[str],
    limits: WatchdogLimits | None = None,
    main: str = MAIN,
) -> int:
    """Run a command line in Ray; the exit code.

    Args:
        prog: of messages.
        checked: the command line.
        arguments: the command line, as typed.
        limits: of the waiting of the ranks' watchdogs.
        main: ``module:function`` of the work.
    """
    config = checked.parsed.config
    try:
        with cluster(config.launch, local_cpus(config, checked.plan)) as ray:
            try:
                run_ranks(ray, prog, config, arguments, limits or WatchdogLimits(), main)
            finally:
                time.sleep(LOGS_S)
    except RunFailed as ended:
        print(f"{prog}: {ended}", file=sys.stderr, flush=True)
        return ended.failure.exit_code
    except UsageError as error:
        print(f"{prog}: error: {error}", file=sys.stderr, flush=True)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print(f"{prog}: stopped by SIGINT", file=sys.stderr, flush=True)
        return 1
    return 0


def run_ranks(
    ray: Any,
    prog: str,
    config: RLRunConfig,
    arguments: Sequence[str],
    limits: WatchdogLimits,
    main: str,
) -> None:
    """Start all ranks and wait for their end.

    Raises:
        RunFailed: one of them failed; none is left.
        UsageError: the cluster has no room, or one node sees a mistake.
    """
    launch = config.launch
    device = device_of(config.parallel.platform, ray.cluster_resources())
    group = reserve(ray, launch, device)
    kind = ray.remote(RankActor)
    actors = [
        kind.options(**actor_options(ray, group, rank // launch.ray_ranks_per_node, device)).remote(
            rank
        )
        for rank in range(launch.num_ranks)
    ]
    calls: list[Any] = []
    try:
        places = [actor.place.remote() for actor in actors]
        port, store = open_store()  # imports torch while they start
        environments = rank_environments(
            ray.get(places),
            launch.ray_ranks_per_node,
            (ray.util.get_node_ip_address(), port),
            device[1] if device else "",
        )
        for actor, environment in zip(actors, environments, strict=True):
            order = Order(prog, tuple(arguments), environment, os.getcwd(), main, limits)
            calls.append(actor.run.remote(order))
        wait_for_end(ray, calls, store)
        ended = [actor.__ray_terminate__.remote() for actor in actors]
        ray.wait(ended, num_returns=len(ended), timeout=EXIT_S)
    except RunFailed as failed:
        if failed.published:  # let ranks print their traceback or dump their stacks
            ray.wait(calls, num_returns=len(calls), timeout=limits.end_s)
        raise
    finally:
        for actor in actors:
            ray.kill(actor)
        ray.util.remove_placement_group(group)


def wait_for_end(ray: Any, calls: Sequence[Any], store: FailureStore) -> None:
    """Wait until all ranks have ended, or one has failed.

    Args:
        ray: the module, connected.
        calls: of `RankActor.run`, by rank.
        store: in which ranks publish failures.

    Raises:
        RunFailed: the failure that was published, or a process that is gone.
        UsageError: a mistake that one node sees, for which others would wait.
    """
    pending = list(calls)
    while pending:
        ready, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_S)
        _raise_published(store)
        for call in ready:
            try:
                mistake = ray.get(call)
            except ray.exceptions.RayError as error:
                _raise_published(store)
                rank = calls.index(call)
                failure = _gone(rank, store, str(error))
                raise RunFailed(failure, published=False) from error
            if mistake:
                raise UsageError(mistake)


def _gone(rank: int, store: FailureStore, evidence: str) -> Failure:
    driver = Member(-1, -1, os.getpid())
    beat = store.beats([rank]).get(rank)
    if beat is not None:
        return lost_failure([beat], evidence, driver)
    text = f"its process ended before it met the others ({evidence})"
    return Failure("lost", Member(rank, -1, -1), "start", text, driver)


def _raise_published(store: FailureStore) -> None:
    failure = store.published()
    if failure is not None:
        raise RunFailed(failure, published=True)


def open_store() -> tuple[int, FailureStore]:
    """The store of a run and its port, one of its own. Imports torch."""
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # this process has no device
    bootstrap.quiet_libraries()
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from mindspeed_rl.launch.failure_store import FailureStore, shared_part

    store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    return int(store.port), FailureStore(shared_part(store), Member(-1, -1, os.getpid()))


# -- the cluster -----------------------------------------------------------------------------------


def import_ray() -> Any:
    """The package, told what it reads when it is imported.

    Raises:
        UsageError: it is not installed.
    """
    for name, value in _RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise UsageError(
            "--orchestrator ray needs the package ray: install the extra, "
            "pip install 'mindspeed-rl-megatron[ray]', or start the ranks with torchrun"
        ) from error
    return ray


@contextmanager
def cluster(launch: LaunchConfig, num_cpus: int) -> Iterator[Any]:
    """Join ``--ray-address``, or start a Ray of one node with ``num_cpus`` and stop it at the end.

    Yields:
        The module ray, connected.

    Raises:
        UsageError: there is no cluster at the address.
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
            object_store_memory=OBJECT_STORE_BYTES, _node_ip_address="127.0.0.1", **common,
        )  # fmt: skip
    else:
        try:
            ray.init(address=address, **common)
        except (ConnectionError, TimeoutError) as error:
            raise UsageError(
                f"--ray-address {address}: no Ray cluster answers there ({error}); start one with "
                "ray start --head, or leave the address out for a local Ray"
            ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


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


def local_cpus(config: RLRunConfig, plan: RLPlan) -> int:
    """CPUs that a local Ray says it has: places for all actors of the run.

    They share the real ones, as the processes of torchrun do.
    """
    per_engine = config.environment.rl_environment_ray_workers
    if config.rewards_in_ray:
        per_engine += config.rewards.reward_num_workers
    return config.launch.num_ranks + plan.engine.num_groups * per_engine


def device_of(platform: str, resources: Mapping[str, float]) -> tuple[str, str] | None:
    """Ray's resource and the variable of a platform's devices; ``None`` on CPUs.

    ``resources``: of the cluster; they decide for ``auto``, since this node may have no device.
    """
    platform = resolve_platform(platform)
    if platform == "auto":
        platform = next((p for p, (name, _) in DEVICES.items() if resources.get(name)), "cpu")
    return DEVICES.get(platform)


def reserve(ray: Any, launch: LaunchConfig, device: tuple[str, str] | None) -> Any:
    """A placement group of one bundle per node, which holds all its ranks.

    Raises:
        UsageError: the cluster has no room, or none became free.
    """
    count = float(launch.ray_ranks_per_node)
    wanted = {"CPU": count} | ({device[0]: count} if device else {})
    check_room(launch, wanted, [n["Resources"] for n in ray.nodes() if n["Alive"]])
    group = ray.util.placement_group([wanted] * launch.ray_num_nodes, strategy="STRICT_SPREAD")
    if not group.wait(START_LIMIT_S):
        ray.util.remove_placement_group(group)
        raise UsageError(
            f"--ray-num-nodes {launch.ray_num_nodes} --ray-ranks-per-node "
            f"{launch.ray_ranks_per_node}: no room became free in {START_LIMIT_S:.0f} s; end other "
            "jobs of the cluster (ray status shows what is in use)"
        )
    return group


def check_room(
    launch: LaunchConfig, wanted: Mapping[str, float], nodes: Sequence[Mapping[str, float]]
) -> None:
    """Whether enough nodes are large enough, however busy they are now.

    Args:
        launch: the flags.
        wanted: of a node.
        nodes: resources of every living node.

    Raises:
        UsageError: there will never be room.
    """
    fit = sum(all(node.get(k, 0.0) >= v for k, v in wanted.items()) for node in nodes)
    if fit >= launch.ray_num_nodes:
        return
    has = "; ".join(
        ", ".join(f"{node.get(name, 0.0):g} {name}" for name in wanted) for node in nodes
    )
    needs = ", ".join(f"{value:g} {name}" for name, value in wanted.items())
    raise UsageError(
        f"--ray-num-nodes {launch.ray_num_nodes} --ray-ranks-per-node {launch.ray_ranks_per_node} "
        f"needs {needs} on each of {launch.ray_num_nodes} nodes; the cluster has {has}"
    )


def actor_options(
    ray: Any, group: Any, node: int, device: tuple[str, str] | None
) -> dict[str, Any]:
    """Options of a rank's actor in the bundle of a node."""
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=node
    )
    options: dict[str, Any] = {"num_cpus": 1, "max_restarts": 0, "max_task_retries": 0}
    if device and device[0] == "GPU":
        options["num_gpus"] = 1
    elif device:
        options["resources"] = {device[0]: 1}
    return options | {"scheduling_strategy": strategy}


def rank_environments(
    places: Sequence[ActorPlace], ranks_per_node: int, endpoint: tuple[str, int], variable: str = ""
) -> list[dict[str, str]]:
    """What torchrun would have set for each rank.

    Args:
        places: of the actor of each rank.
        ranks_per_node: of every node.
        endpoint: host and port of the store, which the driver holds.
        variable: which devices a process sees; empty on CPUs.
    """
    result = []
    for rank in range(len(places)):
        node, local = divmod(rank, ranks_per_node)
        here = places[node * ranks_per_node : (node + 1) * ranks_per_node]
        assert len({place.node for place in here}) == 1, f"node {node} is several: {here}"
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(places)),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(ranks_per_node),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(len(places) // ranks_per_node),
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
