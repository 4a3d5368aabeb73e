"""How an entry runs: parse, start, watch, end in order; under torchrun, or as a rank of Ray.

A usage error is told once, by one rank, in one line, with exit code 2. A failure on any rank is
published to all others, which end within seconds with the cause.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, cast

from mindspeed_rl import bootstrap
from mindspeed_rl.arguments import ParsedArguments, parse
from mindspeed_rl.config import PretrainRunConfig, RLRunConfig, ScoreRunConfig
from mindspeed_rl.config.architecture import model_config
from mindspeed_rl.config.foreign_architecture import check_foreign_architecture
from mindspeed_rl.config.launch import LaunchConfig, check_launch
from mindspeed_rl.config.modules import module_names
from mindspeed_rl.config.npu import NpuSetup, check_npu, npu_setup
from mindspeed_rl.models.registry import spec_from_hf_config, weight_table
from mindspeed_rl.models.spec import read_hf_config
from mindspeed_rl.orchestration.launcher_report import tell_mistake
from mindspeed_rl.orchestration.limits import JOIN, Limits
from mindspeed_rl.platforms.installed import resolve_platform

if TYPE_CHECKING:
    from mindspeed_rl.orchestration.watchdog import Watchdog
    from mindspeed_rl.platforms.base import Platform

Run = TypeVar("Run", RLRunConfig, PretrainRunConfig, ScoreRunConfig)
Plan_co = TypeVar("Plan_co", covariant=True)

USAGE_ERROR = 2
# How long the other ranks of a node let the first one tell a mistake that all of them see; with
# several nodes it imports torch to tell them, too.
FIRST_RANK_S = 5.0
FIRST_RANK_OF_NODES_S = 60.0


@dataclass(frozen=True, slots=True)
class Job(Generic[Run, Plan_co]):
    """Everything that an entry's main function gets.

    ``ignored`` are the flags that were accepted and do nothing here.
    """

    config: Run
    plan: Plan_co
    world: bootstrap.World
    platform: Platform
    watchdog: Watchdog
    ignored: tuple[str, ...]

    def say(self, *lines: str) -> None:
        """Print on rank 0."""
        if self.world.rank == 0:
            for line in lines:
                print(line, flush=True)


@dataclass(frozen=True, slots=True)
class Checked(Generic[Run, Plan_co]):
    """A command line that was found possible for a number of ranks."""

    parsed: ParsedArguments[Run]
    plan: Plan_co
    setup: NpuSetup | None


def run_entry(
    prog: str,
    run_type: type[Run],
    check: Callable[[Run, int], Plan_co],
    main: Callable[[Job[Run, Plan_co]], None],
    argv: Sequence[str] | None = None,
    limits: Limits | None = None,
) -> None:
    """Run ``main`` under torchrun, or start ranks in Ray. Never returns normally on failure.

    Args:
        prog: name in ``--help``.
        run_type: configuration class.
        check: configuration and world size -> plan; raises ``ValueError`` for the user's faults.
        main: the work.
        argv: command line; default ``sys.argv[1:]``.
        limits: patience of the watchdog.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    world = bootstrap.World.from_environment()
    if world.local_rank != 0 and {"-h", "--help"} & set(arguments):
        sys.exit(0)  # the first rank prints it
    try:
        bootstrap.refuse_foreign_package()
        parsed = parse(run_type, arguments, prog)
        config = parsed.config
        launch = config.launch if isinstance(config, RLRunConfig) else LaunchConfig()
        in_ray = launch.orchestrator == "ray"
        num_ranks = launch.num_ranks if in_ray else world.size
        if isinstance(config, RLRunConfig | PretrainRunConfig):
            if config.dry_run.rl_dry_run:
                sys.exit(_dry_run(config, parsed, world, num_ranks if in_ray else None))
            check_launch(launch, os.environ, prog)
            if in_ray or "RANK" in os.environ:
                _check_world_size(config, num_ranks, "Ray starts" if in_ray else "torchrun started")
        if not in_ray:
            bootstrap.require_launcher(prog, os.environ)
        checked = check_run(parsed, check, num_ranks)
    except ValueError as error:
        _usage_error(prog, error, world, limits or Limits())
    if in_ray:
        from mindspeed_rl.orchestration.ray_controller import drive

        sys.exit(drive(prog, cast(Any, checked), arguments))
    job = start_job(prog, checked, world, limits)
    try:
        main(job)
        end_job(job)
    except BaseException as error:
        job.watchdog.fail(error)


def check_run(
    parsed: ParsedArguments[Run], check: Callable[[Run, int], Plan_co], num_ranks: int
) -> Checked[Run, Plan_co]:
    """Find the user's mistakes before anything heavy is imported. Local.

    Raises:
        ValueError: one of them.
    """
    plan = check(parsed.config, num_ranks)
    setup = _npu_setup(parsed)
    _check_script(parsed, read_hf_config(parsed.config.model.hf_checkpoint))
    return Checked(parsed, plan, setup)


def start_job(
    prog: str,
    checked: Checked[Run, Plan_co],
    world: bootstrap.World,
    limits: Limits | None = None,
    *,
    driver_tells: bool = False,
) -> Job[Run, Plan_co]:
    """Import torch, meet the other ranks and set the seeds; ends the process when that fails.

    Collective: the world. With ``driver_tells`` failures are printed by the driver, not here.
    """
    config = checked.parsed.config
    parallel = config.parallel
    deterministic = checked.setup is not None and checked.setup.deterministic
    changed = bootstrap.prepare_environment(
        parallel.platform, os.environ, deterministic=deterministic
    )
    bootstrap.quiet_libraries()
    watchdog = _start_watchdog(
        prog, world, config.logging.phase_timeout_s, limits, driver_tells=driver_tells
    )
    try:
        # from here on a rank that fails is known to others, also to those that wait for it to join
        minutes = parallel.distributed_timeout_minutes
        with watchdog.phase(JOIN, timeout_s=60.0 * minutes):
            platform = bootstrap.start(parallel.platform, minutes, world, checked.setup)
        job = Job(config, checked.plan, world, platform, watchdog, checked.parsed.ignored)
        job.say(*changed)
        bootstrap.seed_everything(config.train.seed)
    except BaseException as error:
        watchdog.fail(error)
    return job


def end_job(job: Job[Run, Plan_co]) -> None:
    """End together with the other ranks. Collective: the world."""
    job.watchdog.leave()
    if "vllm" not in sys.modules:  # else its own exit handler destroys the groups
        import torch.distributed as dist

        dist.destroy_process_group()


def _dry_run(
    config: RLRunConfig | PretrainRunConfig,
    parsed: ParsedArguments[Any],
    world: bootstrap.World,
    num_ranks: int | None,
) -> int:
    """Predict the run; under torchrun, which knows the ranks, the first one speaks for all."""
    if world.rank != 0:
        return 0
    from mindspeed_rl.dryrun.command import dry_run

    hf_config = model_config(config.model.hf_checkpoint, "--hf-checkpoint", files=False)
    _check_script(parsed, hf_config)
    given = {"WORLD_SIZE": str(num_ranks)} if num_ranks else {}
    return dry_run(config, os.environ | given)


def _npu_setup(parsed: ParsedArguments[Any]) -> NpuSetup | None:
    """What an NPU process is told; ``None`` on other platforms."""
    config = parsed.config
    platform = resolve_platform(config.parallel.platform)
    if platform != "npu":
        if config.ascend.swap_optimizer:
            raise ValueError(
                f"--swap-optimizer is done by MindSpeed, on NPUs only; on {platform} take "
                "--rl-offload optimizer, which moves the state out while the engine samples"
            )
        return None
    check_npu(config.ascend, config.parallel, parsed.ignored)
    grouped = module_names(config.model, config.parallel.platform).grouped_experts
    return npu_setup(config.ascend, config.parallel, config.train, grouped=grouped)


def _check_script(parsed: ParsedArguments[Any], hf_config: dict[str, Any]) -> None:
    """Compare the architecture flags of the script with the model."""
    implied = dict(weight_table(spec_from_hf_config(hf_config).family).config_keys)
    check_foreign_architecture(parsed.checked_arch, implied | hf_config)


def _check_world_size(
    config: RLRunConfig | PretrainRunConfig, num_ranks: int, starter: str
) -> None:
    given = config.dry_run.rl_world_size
    if given and given != num_ranks:
        raise ValueError(
            f"--rl-world-size {given}, but {starter} {num_ranks} ranks; start that many, or remove "
            "the flag"
        )


def _start_watchdog(
    prog: str,
    world: bootstrap.World,
    phase_timeout_s: float,
    limits: Limits | None,
    *,
    driver_tells: bool,
) -> Watchdog:
    from mindspeed_rl.orchestration.watchdog import Watchdog

    try:
        watchdog = Watchdog(world, phase_timeout_s, prog, limits, driver_tells=driver_tells)
    except RuntimeError as error:
        if world.local_rank == 0:
            print(f"{prog}: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    watchdog.start()
    return watchdog


def _usage_error(prog: str, error: ValueError, world: bootstrap.World, limits: Limits) -> NoReturn:
    """Tell a mistake once per node: its first rank prints; others print only what it does not see.

    The first rank to end makes the launcher end the rest, so the others wait. Other nodes may not
    see the mistake (a file that only one of them lacks): they read of it in torchrun's store
    instead of waiting for this node to join.
    """
    several_nodes = world.local_size < world.size and "MASTER_ADDR" in os.environ
    if world.local_rank != 0:
        time.sleep(FIRST_RANK_OF_NODES_S if several_nodes else FIRST_RANK_S)
    tell_mistake(f"{prog}: error: {error}")
    if several_nodes:
        bootstrap.quiet_libraries()
        from mindspeed_rl.orchestration.launcher_store import publish_usage_error

        publish_usage_error(world, str(error), limits)
    sys.exit(USAGE_ERROR)
