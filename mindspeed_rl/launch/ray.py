"""``--orchestrator ray``: Ray starts, places and watches the same ranks that torchrun would.

One process, the driver, runs a job. A node of the cluster gets one bundle of a placement group,
which holds an actor per rank; each actor sets the environment that torchrun would have set and runs
the entry to its end. Like torchrun's agent the driver holds the store in which ranks meet and
publish failures, so it learns of a failure when they do. The first actor to fail ends all actors.

Ray assigns devices but does not hide them: as under torchrun a rank sees all devices of its job on
its node and takes the one of its ``LOCAL_RANK``, because neighbours map each other's memory.
"""

from __future__ import annotations

import logging
import os
import pkgutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.config.launch import LaunchConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.installed import VISIBLE_DEVICES, import_ray, resolve_platform
from mindspeed_rl.core.ranks import counted
from mindspeed_rl.core.redaction import is_secret
from mindspeed_rl.elastic.commands import smaller_problem
from mindspeed_rl.launch import bootstrap
from mindspeed_rl.launch.attempt import BEGAN, RESTARTS, End, continued
from mindspeed_rl.launch.failures import (
    USAGE_ERROR,
    Failure,
    Member,
    WatchdogSettings,
    lost_failure,
)
from mindspeed_rl.launch.job import (
    Checked,
    plan_run,
    prepare_rank,
    run_job,
    tell_other_nodes,
)
from mindspeed_rl.launch.restart import Rules, decide, restart_line
from mindspeed_rl.planning.run_plan import RLPlan, plan_rl
from mindspeed_rl.rewards.worker_process import worker_environment

if TYPE_CHECKING:
    from mindspeed_rl.launch.failure_store import FailureStore

START_LIMIT_S = 300.0  # limit for all bundles to start: other jobs of the cluster may end
LOOK_S = 5.0  # how often a driver looks whether a node is lost while it waits for room
POLL_S = 0.2  # longest delay until a failure is noticed
EXIT_S = 20.0  # limit of the ranks' exit handlers
LOGS_S = 1.0  # time for the last lines of the ranks to arrive
OBJECT_STORE_BYTES = 80 << 20  # the least that Ray accepts; ranks do not use it

RESOURCES = {"npu": "NPU", "cuda": "GPU"}
"""Ray's name of the devices of a platform."""
# Variables that libraries read are forwarded, as cluster nodes have their own environment.
_FORWARDED = (
    "ASCEND_", "CPU_AFFINITY", "CUDA_", "GLOO_", "HCCL_", "HF_", "LCCL_", "MINDSPEED_", "NCCL_",
    "OMP_", "PYTORCH_", "TASK_QUEUE_", "TORCH_", "TRANSFORMERS_", "VLLM_",
)  # fmt: skip
_RAY_SETTINGS = {
    "RAY_DEDUP_LOGS": "0",  # print equal lines of two ranks twice
    "RAY_COLOR_PREFIX": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # of a local Ray: its default of 15 slows ranks on a busy machine
}


# -- a rank ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Command:
    """The command line that every rank runs.

    Attributes:
        prog: Module of the entry; its ``main`` does the work.
        arguments: Arguments as typed.
        folder: Working directory, the base of relative paths.
        settings: Settings of the ranks' watchdogs.
    """

    prog: str
    arguments: tuple[str, ...]
    folder: str
    settings: WatchdogSettings


class RankActor:
    """The process of one rank, the same as under torchrun."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __repr__(self) -> str:
        return f"rank {self._rank}"  # Ray labels lines of output with it

    def devices(self) -> list[str]:
        """Return the ids of the actor's devices, one or none."""
        import ray

        ids = ray.get_runtime_context().get_accelerator_ids().values()
        return [device for several in ids for device in several]

    def run(self, command: Command, environment: Mapping[str, str]) -> None:
        """Run this rank to its end; a failure is published and ends the process.

        Collective: the world.

        Args:
            command: Command to run.
            environment: Variables that make this process a rank.
        """
        os.environ.update(environment)
        world = bootstrap.World.from_environment()
        try:
            _enter(command.folder)
            typed = parse(RLRunConfig, list(command.arguments), command.prog)
            parsed, notes = continued(typed, os.environ)
            checked = plan_run(parsed, plan_rl, world.size)
            notes += prepare_rank(checked)
        except UsageError as error:
            tell_other_nodes(world, error, command.settings)
            return
        main = pkgutil.resolve_name(f"{command.prog}:main")
        run_job(command.prog, checked, world, main, command.settings, notes)


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
    settings: WatchdogSettings,
) -> int:
    """Run a command line in Ray and return the exit code.

    Args:
        prog: Module of the entry.
        checked: Checked command line.
        arguments: Arguments as typed.
        settings: Settings of the ranks' watchdogs.
    """
    config = checked.parsed.config
    settings = replace(settings, driver_reports=True, exit_s=EXIT_S)
    command = Command(prog, tuple(arguments), os.getcwd(), settings)
    os.environ.setdefault(BEGAN, str(time.time()))
    try:
        with cluster(config.launch, local_cpus(config, checked.plan)) as ray:
            try:
                failure = run_attempts(ray, config, command)
            finally:
                time.sleep(LOGS_S)
    except UsageError as error:
        end, code = f"error: {error}", USAGE_ERROR
    except KeyboardInterrupt:
        end, code = "stopped by SIGINT", 1
    else:
        end, code = (str(failure), failure.exit_code) if failure else ("", 0)
    if code:
        print(f"{prog}: {end}", file=sys.stderr, flush=True)
    return code


def run_attempts(ray: Any, config: RLRunConfig, command: Command) -> Failure | None:
    """Run all ranks to their end, up to ``--max-restarts`` times again after a failure.

    Raises:
        UsageError: The cluster has no room.
    """
    launch = config.launch
    rules = Rules(launch.max_restarts, launch.restart_backoff_s)
    per_node, fewest = launch.ray_ranks_per_node, launch.elastic_min_nodes
    problem_of = smaller_problem(command.prog, command.arguments, per_node)
    if fewest and (problem := problem_of(fewest)):
        raise UsageError(f"--elastic-min-nodes {fewest}: {problem}; name more nodes")
    ends: list[End] = []
    while True:
        try:
            failure = run_ranks(ray, config, command, len(ends))
        except _NodeLostError:
            config = with_nodes_left(ray, config, launch, problem_of, command, len(ends))
            continue
        if failure is None:
            return None
        ends.append(End(failure.kind, failure.phase, str(failure), failure.step))
        if not rules.max_restarts:
            return failure
        decision = decide(rules, ends)
        if decision.stop:
            print(f"{command.prog}: no restart: {decision.stop}", file=sys.stderr, flush=True)
            return failure
        line = restart_line(rules, ends, decision.pause_s)
        print(f"{command.prog}: {line}", file=sys.stderr, flush=True)
        time.sleep(decision.pause_s)
        if fewest:
            config = with_nodes_left(ray, config, launch, problem_of, command, len(ends))


class _NodeLostError(Exception):
    """A node is gone that was to take part in an attempt."""


def with_nodes_left(
    ray: Any,
    config: RLRunConfig,
    whole: LaunchConfig,
    problem_of: Callable[[int], str],
    command: Command,
    restarts: int,
) -> RLRunConfig:
    """Return the configuration for the nodes that a job goes on with, and print their number.

    Args:
        ray: The module ray, connected to a cluster.
        config: Configuration of the attempt before.
        whole: Flags of the launch of the whole job.
        problem_of: Says why the job cannot run on a number of nodes; empty: it can.
        command: Command of every rank.
        restarts: How often the job was started before.

    Raises:
        UsageError: Too few nodes are left, or the layout allows none of their numbers.
    """
    platform = cluster_platform(config.parallel.platform, ray.cluster_resources())
    count = nodes_left(ray, whole, platform, problem_of)
    ranks = counted(count * whole.ray_ranks_per_node, "rank")
    line = f"attempt {restarts + 1} runs on {count} of {whole.ray_num_nodes} nodes, {ranks}"
    print(f"{command.prog}: {line}", file=sys.stderr, flush=True)
    return replace(config, launch=replace(whole, ray_num_nodes=count))


def nodes_left(
    ray: Any, launch: LaunchConfig, platform: str, problem_of: Callable[[int], str]
) -> int:
    """Return with how many nodes a job goes on, when lost ones had time to come back.

    Args:
        ray: The module ray, connected to a cluster.
        launch: Flags of the launch.
        platform: Platform of the ranks.
        problem_of: Says why the job cannot run on a number of nodes; empty: it can.

    Raises:
        UsageError: Too few nodes are left, or the layout allows none of their numbers.
    """
    wanted, most, fewest = room(launch, platform), launch.ray_num_nodes, launch.elastic_min_nodes
    began, fit = time.monotonic(), 0
    while fit < most:
        fit = min(most, fitting(wanted, living(ray)))
        waited = time.monotonic() - began
        if waited >= (launch.elastic_wait_s if fit >= fewest else START_LIMIT_S):
            break
        time.sleep(POLL_S)
    problems = []
    for count in range(fit, fewest - 1, -1):
        problem = problem_of(count)
        if not problem:
            return count
        problems.append(problem)
    left = f"{fit} of at least {fewest} nodes are left in the cluster"
    raise UsageError(f"--elastic-min-nodes {fewest}: {problems[0] if problems else left}")


def run_ranks(ray: Any, config: RLRunConfig, command: Command, restarts: int = 0) -> Failure | None:
    """Run all ranks to their end, kill those that are left, and return the failure, if any.

    Args:
        ray: The module ray, connected to a cluster.
        config: Configuration of the run.
        command: Command of every rank.
        restarts: How often the job was started before. A cluster that lost a node gets the time to
            replace it.

    Raises:
        UsageError: The cluster has no room.
    """
    launch = config.launch
    platform = cluster_platform(config.parallel.platform, ray.cluster_resources())
    group = reserve(ray, launch, platform, waits=restarts > 0)
    kind = ray.remote(RankActor)
    actors = [
        kind.options(**actor_options(ray, group, rank // launch.ray_ranks_per_node, platform))
        .remote(rank)
        for rank in range(launch.num_ranks)
    ]  # fmt: skip
    try:
        devices = [actor.devices.remote() for actor in actors]
        address = ray.util.get_node_ip_address()
        port, store = open_store(address)  # imports torch while the actors start
        environments = rank_environments(
            ray.get(devices),
            launch.ray_ranks_per_node,
            (address, port),
            VISIBLE_DEVICES.get(platform, ""),
        )
        attempt = {RESTARTS: str(restarts), BEGAN: os.environ[BEGAN]}
        environments = [environment | attempt for environment in environments]
        pairs = zip(actors, environments, strict=True)
        calls = [actor.run.remote(command, environment) for actor, environment in pairs]
        failure = wait_for_end(ray, calls, store)
        if failure:  # ranks print a traceback or dump their stacks, and end
            ray.wait(calls, num_returns=len(calls), timeout=command.settings.end_s)
        else:
            ended = [actor.__ray_terminate__.remote() for actor in actors]
            ray.wait(ended, num_returns=len(ended), timeout=EXIT_S)
        return failure
    finally:
        for actor in actors:
            ray.kill(actor)
        ray.util.remove_placement_group(group)


def wait_for_end(ray: Any, calls: Sequence[Any], store: FailureStore) -> Failure | None:
    """Wait until all ranks have ended, or one has failed.

    Args:
        ray: The module ray, connected to a cluster.
        calls: Calls of `RankActor.run`, by rank.
        store: Store of failures; this function publishes those of processes that are gone.

    Returns:
        The first failure, which all ranks read as well.
    """
    pending = list(calls)
    while pending:
        ready, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_S)
        for call in ready:
            try:
                ray.get(call)
            except ray.exceptions.RayError as error:
                store.publish(_gone(calls.index(call), store, str(error)))
        if failure := store.published():
            return failure
    return None


def _gone(rank: int, store: FailureStore, evidence: str) -> Failure:
    driver = Member(-1, -1, os.getpid())
    if beat := store.beats([rank]).get(rank):
        return lost_failure([beat], evidence, driver)
    text = f"its process ended before it met the others ({evidence})"
    return Failure("lost", Member(rank, -1, -1), "start", text, driver)


def open_store(address: str) -> tuple[int, FailureStore]:
    """Open a new store that listens on an address of this machine. Imports torch.

    Returns:
        Its port, and the store of failures in it.
    """
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # this process has no device
    bootstrap.quiet_libraries()
    from mindspeed_rl.launch.bound_store import BoundStore
    from mindspeed_rl.launch.failure_store import FailureStore, shared_part

    store = BoundStore(address, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    return int(store.port), FailureStore(shared_part(store), Member(-1, -1, os.getpid()))


# -- the cluster -----------------------------------------------------------------------------------


@contextmanager
def cluster(launch: LaunchConfig, num_cpus: int) -> Iterator[Any]:
    """Join ``--ray-address``, or start a Ray of one node with ``num_cpus`` and stop it at the end.

    Yields:
        The module ray, connected.

    Raises:
        UsageError: Ray is not installed, or there is no cluster at the address.
    """
    for name, value in _RAY_SETTINGS.items():  # Ray reads them when it is imported
        os.environ.setdefault(name, value)
    ray = import_ray("--orchestrator ray", "start the ranks with torchrun")
    address = launch.ray_address or os.environ.get("RAY_ADDRESS", "")
    variables = forwarded(os.environ)
    for name in VISIBLE_DEVICES.values():
        variables[f"RAY_EXPERIMENTAL_NOSET_{name}"] = "1"
    options: dict[str, Any] = {"address": address}
    if not address:
        options = {
            "address": "local",
            "num_cpus": num_cpus,
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "_node_ip_address": "127.0.0.1",
        }
    try:
        ray.init(
            runtime_env={"env_vars": variables}, logging_level=logging.WARNING, **options,
        )  # fmt: skip
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
    """Return the variables of this process that every worker gets before it starts."""
    found = {
        name: value
        for name, value in environ.items()
        if name.startswith(_FORWARDED)
        and name not in VISIBLE_DEVICES.values()
        and not is_secret(name, value)  # Ray would show them
    }
    found["PYTHONPATH"] = worker_environment(environ)["PYTHONPATH"]
    found.setdefault("OMP_NUM_THREADS", "1")  # Ray would set it to the CPUs of the actor
    return found


def local_cpus(config: RLRunConfig, plan: RLPlan) -> int:
    """Return the number of CPUs that a local Ray claims: enough for all actors of the run.

    They share the real CPUs, as the processes of torchrun do.
    """
    per_engine = config.environment.rl_environment_ray_workers
    if config.rewards_in_ray:
        per_engine += config.rewards.reward_num_workers
    return config.launch.num_ranks + plan.engine.num_groups * per_engine


def cluster_platform(platform: str, resources: Mapping[str, float]) -> str:
    """Resolve ``--platform`` for the cluster; this node may have no devices.

    ``resources``: Resources of the cluster, which decide for ``auto``.
    """
    platform = resolve_platform(platform)
    if platform == "auto":
        return next((p for p, name in RESOURCES.items() if resources.get(name)), "cpu")
    return platform


def reserve(ray: Any, launch: LaunchConfig, platform: str, *, waits: bool = False) -> Any:
    """Return a placement group of one bundle per node, each with room for all ranks of the node.

    With ``waits`` nodes that are missing may still join the cluster.

    Raises:
        UsageError: The cluster has no room, or none became free in time.
        _NodeLostError: A node is gone, and the job may go on with fewer.
    """
    wanted = room(launch, platform)
    if not waits:
        check_room(launch, wanted, living(ray))
    group = ray.util.placement_group([wanted] * launch.ray_num_nodes, strategy="STRICT_SPREAD")
    end = time.monotonic() + START_LIMIT_S
    while not group.wait(LOOK_S):
        if launch.elastic_min_nodes and fitting(wanted, living(ray)) < launch.ray_num_nodes:
            ray.util.remove_placement_group(group)
            raise _NodeLostError  # Ray learns of a lost machine later than its ranks do
        if time.monotonic() < end:
            continue
        ray.util.remove_placement_group(group)
        raise UsageError(
            f"--ray-num-nodes {launch.ray_num_nodes} --ray-ranks-per-node "
            f"{launch.ray_ranks_per_node}: no room became free in {START_LIMIT_S:.0f} s; end other "
            "jobs of the cluster (ray status shows what is in use)"
        )
    return group


def room(launch: LaunchConfig, platform: str) -> dict[str, float]:
    """Return the resources of a node of the job."""
    kinds = ["CPU", *([RESOURCES[platform]] if platform in RESOURCES else [])]
    return dict.fromkeys(kinds, float(launch.ray_ranks_per_node))


def living(ray: Any) -> list[Mapping[str, float]]:
    """Return the resources of every living node of the cluster."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def fitting(wanted: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> int:
    """Return how many nodes have the resources, however busy they are now."""
    return sum(all(node.get(k, 0.0) >= v for k, v in wanted.items()) for node in nodes)


def check_room(
    launch: LaunchConfig, wanted: Mapping[str, float], nodes: Sequence[Mapping[str, float]]
) -> None:
    """Check that enough nodes are large enough, however busy they are now.

    Args:
        launch: Flags of the launch.
        wanted: Resources that each node needs.
        nodes: Resources of every living node.

    Raises:
        UsageError: The cluster is too small.
    """
    if fitting(wanted, nodes) < launch.ray_num_nodes:
        has = "; ".join(", ".join(f"{node.get(k, 0.0):g} {k}" for k in wanted) for node in nodes)
        needs = ", ".join(f"{value:g} {name}" for name, value in wanted.items())
        raise UsageError(
            f"--ray-num-nodes {launch.ray_num_nodes} --ray-ranks-per-node "
            f"{launch.ray_ranks_per_node} needs {needs} on each of {launch.ray_num_nodes} nodes; "
            f"the cluster has {has}"
        )


def actor_options(ray: Any, group: Any, node: int, platform: str) -> dict[str, Any]:
    """Return the options of a rank's actor in the bundle of a node."""
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=node
    )
    options: dict[str, Any] = {"num_cpus": 1, "scheduling_strategy": strategy}
    if platform == "cuda":
        options["num_gpus"] = 1
    elif platform in RESOURCES:
        options["resources"] = {RESOURCES[platform]: 1}
    return options


def rank_environments(
    devices: Sequence[Sequence[str]],
    ranks_per_node: int,
    endpoint: tuple[str, int],
    variable: str = "",
) -> list[dict[str, str]]:
    """Return the variables that torchrun would have set for each rank.

    Args:
        devices: Ids of the devices of each rank's actor; the ranks of a node are neighbours.
        ranks_per_node: Number of ranks on every node.
        endpoint: Host and port of the store, which the driver holds.
        variable: Name of the variable that selects visible devices; empty on CPUs.
    """
    result = []
    for rank in range(len(devices)):
        node, local = divmod(rank, ranks_per_node)
        here = devices[node * ranks_per_node : (node + 1) * ranks_per_node]
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(devices)),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(ranks_per_node),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(len(devices) // ranks_per_node),
            "MASTER_ADDR": endpoint[0],
            "MASTER_PORT": str(endpoint[1]),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        if variable:
            visible = [device for ids in here for device in ids]
            environment[variable] = ",".join(sorted(visible, key=lambda d: (len(d), d)))
        result.append(environment)
    return result
