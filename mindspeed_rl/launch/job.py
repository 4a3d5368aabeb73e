"""A rank of a job, from a checked command line to its end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mindspeed_rl.compat.architecture import check_foreign_architecture
from mindspeed_rl.config import PretrainRunConfig, RLRunConfig, ScoreRunConfig
from mindspeed_rl.config.arguments import ParsedArguments
from mindspeed_rl.config.modules import module_names
from mindspeed_rl.config.npu import NpuSetup, check_npu, npu_setup
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.installed import resolve_platform
from mindspeed_rl.launch import bootstrap
from mindspeed_rl.launch.failures import JOIN, WatchdogLimits
from mindspeed_rl.models.registry import spec_from_hf_config, weight_table
from mindspeed_rl.models.spec import read_hf_config

if TYPE_CHECKING:
    from mindspeed_rl.launch.watchdog import Watchdog
    from mindspeed_rl.platforms.base import Platform

Run = TypeVar("Run", RLRunConfig, PretrainRunConfig, ScoreRunConfig)
Plan_co = TypeVar("Plan_co", covariant=True)


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

    def log_rank0(self, *lines: str) -> None:
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


def check_run(
    parsed: ParsedArguments[Run], check: Callable[[Run, int], Plan_co], num_ranks: int
) -> Checked[Run, Plan_co]:
    """Find the user's mistakes before anything heavy is imported. Local.

    Raises:
        UsageError: one of them.
    """
    plan = check(parsed.config, num_ranks)
    setup = npu_setup_of(parsed)
    check_script(parsed, read_hf_config(parsed.config.model.hf_checkpoint))
    return Checked(parsed, plan, setup)


def start_job(
    prog: str,
    checked: Checked[Run, Plan_co],
    world: bootstrap.World,
    limits: WatchdogLimits | None = None,
    *,
    driver_reports: bool = False,
) -> Job[Run, Plan_co]:
    """Import torch, meet the other ranks and set the seeds; ends the process when that fails.

    Collective: the world. With ``driver_reports`` failures are printed by the driver, not here.
    """
    config = checked.parsed.config
    parallel = config.parallel
    deterministic = checked.setup is not None and checked.setup.deterministic
    changed = bootstrap.prepare_environment(
        parallel.platform, os.environ, deterministic=deterministic
    )
    bootstrap.quiet_libraries()
    watchdog = _start_watchdog(
        prog, world, config.logging.phase_timeout_s, limits, driver_reports=driver_reports
    )
    try:
        # from here on a rank that fails is known to others, also to those that wait for it to join
        minutes = parallel.distributed_timeout_minutes
        with watchdog.phase(JOIN, timeout_s=60.0 * minutes):
            platform = bootstrap.start(parallel.platform, minutes, world, checked.setup)
        job = Job(config, checked.plan, world, platform, watchdog, checked.parsed.ignored)
        job.log_rank0(*changed)
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


def run_job(
    prog: str,
    checked: Checked[Run, Plan_co],
    world: bootstrap.World,
    main: Callable[[Job[Run, Plan_co]], None],
    limits: WatchdogLimits | None = None,
    *,
    driver_reports: bool = False,
) -> None:
    """Start, run and end a rank; ends the process when that fails. Collective: the world."""
    job = start_job(prog, checked, world, limits, driver_reports=driver_reports)
    try:
        main(job)
        end_job(job)
    except BaseException as error:
        job.watchdog.fail(error)


def npu_setup_of(parsed: ParsedArguments[Any]) -> NpuSetup | None:
    """What an NPU process is told; ``None`` on other platforms."""
    config = parsed.config
    platform = resolve_platform(config.parallel.platform)
    if platform != "npu":
        if config.ascend.swap_optimizer:
            raise UsageError(
                f"--swap-optimizer is done by MindSpeed, on NPUs only; on {platform} take "
                "--rl-offload optimizer, which moves the state out while the engine samples"
            )
        return None
    check_npu(config.ascend, config.parallel, parsed.ignored)
    grouped = module_names(config.model, config.parallel.platform).grouped_experts
    return npu_setup(config.ascend, config.parallel, config.train, grouped=grouped)


def check_script(parsed: ParsedArguments[Any], hf_config: dict[str, Any]) -> None:
    """Compare the architecture flags of the script with the model."""
    implied = dict(weight_table(spec_from_hf_config(hf_config).family).config_keys)
    check_foreign_architecture(parsed.checked_arch, implied | hf_config)


def _start_watchdog(
    prog: str,
    world: bootstrap.World,
    phase_timeout_s: float,
    limits: WatchdogLimits | None,
    *,
    driver_reports: bool,
) -> Watchdog:
    from mindspeed_rl.launch.watchdog import Watchdog

    try:
        watchdog = Watchdog(world, phase_timeout_s, prog, limits, driver_reports=driver_reports)
    except RuntimeError as error:
        if world.local_rank == 0:
            print(f"{prog}: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    watchdog.start()
    return watchdog
