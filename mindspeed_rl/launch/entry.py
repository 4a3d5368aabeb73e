"""Runs an entry: parses and checks its flags, then is a rank of torchrun or the driver of Ray.

A usage error is printed once, by one rank, a line for each mistake, with exit code 2. A failure on
any rank is published to all others, which end within seconds with the cause.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

from mindspeed_rl.command_line.arguments import ParsedArguments, Run, as_typed, parse
from mindspeed_rl.command_line.hub_models import with_local_models
from mindspeed_rl.config import PretrainRunConfig, RLRunConfig
from mindspeed_rl.config.launch import LaunchConfig, check_launch
from mindspeed_rl.core.errors import Mistakes, UsageError
from mindspeed_rl.core.ranks import counted
from mindspeed_rl.flag_checks.single_flags import check_rl_flags, check_supervised_flags
from mindspeed_rl.launch import bootstrap
from mindspeed_rl.launch.attempt import check_peer_folder, continued
from mindspeed_rl.launch.failures import USAGE_ERROR, WatchdogSettings, report_usage_error
from mindspeed_rl.launch.job import (
    Job,
    Plan_co,
    plan_run,
    predict,
    prepare_rank,
    run_job,
    tell_other_nodes,
)

# How long the other ranks of a node wait until the first one has reported a mistake that all of
# them see. With several nodes it imports torch to report it to them, too.
FIRST_RANK_S = 5.0
FIRST_RANK_OF_NODES_S = 60.0
CHECK_ONLY = "MINDSPEED_RL_CHECK_ONLY"
"""Variable with a number of ranks: the flags are checked for so many, and nothing is started."""


def run_entry(
    prog: str,
    run_type: type[Run],
    plan: Callable[[Run, int], Plan_co],
    main: Callable[[Job[Run, Plan_co]], None],
    argv: Sequence[str] | None = None,
    settings: WatchdogSettings | None = None,
) -> None:
    """Run ``main`` under torchrun, or start ranks in Ray. Never returns normally on failure.

    Args:
        prog: Name of the entry's module, for ``--help``; actors of Ray import its ``main``.
        run_type: Class of the run's configuration.
        plan: Makes the plan of a configuration and world size; raises `UsageError`.
        main: Function that does the work of a rank.
        argv: Command line; default ``sys.argv[1:]``.
        settings: Settings of the watchdog.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    settings = settings or WatchdogSettings()
    world = bootstrap.World.from_environment()
    if world.local_rank != 0 and {"-h", "--help"} & set(arguments):
        sys.exit(0)  # the first rank prints it
    try:
        bootstrap.refuse_foreign_package()
        typed = parse(run_type, arguments, prog, keep_refused=True)
        parsed, notes = continued(typed, os.environ)
        parsed = _with_local_models(parsed, world.size)
        config = parsed.config
        launch = config.launch if isinstance(config, RLRunConfig) else LaunchConfig()
        in_ray = launch.orchestrator == "ray"
        num_ranks = launch.num_ranks if in_ray else world.size
        if only_for := os.environ.get(CHECK_ONLY):  # what launches the ranks is not there yet
            plan_run(parsed, plan, int(only_for))
            sys.exit(0)
        if _is_dry_run(config):
            sys.exit(_dry_run(parsed, world, num_ranks if in_ray else None))
        mistakes = Mistakes()
        with mistakes:
            _check_start(config, launch, num_ranks, prog)
        if not in_ray:
            with mistakes:
                bootstrap.join_launcher(prog, os.environ)
        with mistakes:
            checked = plan_run(parsed, plan, num_ranks)
        mistakes.report()
        if not in_ray:
            notes += prepare_rank(checked)
    except UsageError as error:
        _usage_error(prog, as_typed(error, run_type, arguments), world, settings)
    if in_ray:
        from mindspeed_rl.launch.ray import drive

        sys.exit(drive(prog, cast(Any, checked), arguments, settings))
    run_job(prog, checked, world, main, settings, notes)


def _predicts(config: object) -> bool:
    """Whether a run is only predicted, or starts from drawn weights."""
    return (isinstance(config, RLRunConfig) and config.benchmark.active) or _is_dry_run(config)


def _is_dry_run(config: object) -> bool:
    return isinstance(config, RLRunConfig | PretrainRunConfig) and config.dry_run.rl_dry_run


def _dry_run(parsed: ParsedArguments[Any], world: bootstrap.World, num_ranks: int | None) -> int:
    """Predict the run; under torchrun, which sets the number of ranks, only rank 0 prints."""
    if world.rank != 0:
        return 0
    given = {"WORLD_SIZE": str(num_ranks)} if num_ranks else {}
    return predict(parsed, os.environ | given)


def _with_local_models(parsed: ParsedArguments[Run], num_ranks: int) -> ParsedArguments[Run]:
    """Return a command line whose models are directories; see :func:`with_local_models`.

    Raises:
        UsageError: A model is not to be had; it has what else the flags alone say, as well.
    """
    config: Any = parsed.config
    files = not _predicts(config)
    mistakes = Mistakes()
    with mistakes:
        return with_local_models(parsed, weights=files)
    with mistakes:
        if isinstance(config, RLRunConfig):
            check_rl_flags(config, num_ranks, files=files)
        elif isinstance(config, PretrainRunConfig):
            check_supervised_flags(config, num_ranks, files=files)
    mistakes.report(parsed.refused)
    raise AssertionError("a model is missing, so there is a mistake")


def _check_start(config: object, launch: LaunchConfig, num_ranks: int, prog: str) -> None:
    """Check the flags against the way in which this process was started."""
    if not isinstance(config, RLRunConfig | PretrainRunConfig):
        return
    in_ray = launch.orchestrator == "ray"
    mistakes = Mistakes()
    with mistakes:
        check_launch(launch, os.environ, prog)
    with mistakes:
        check_peer_folder(config, {} if in_ray else os.environ)
    with mistakes:
        if in_ray or "RANK" in os.environ:
            _check_world_size(config, num_ranks, "Ray starts" if in_ray else "torchrun started")
    mistakes.report()


def _check_world_size(
    config: RLRunConfig | PretrainRunConfig, num_ranks: int, starter: str
) -> None:
    given = config.dry_run.rl_world_size
    if given and given != num_ranks:
        raise UsageError(
            f"--rl-world-size {given}, but {starter} {counted(num_ranks, 'rank')}; start that "
            "many, or remove the flag"
        )


def _usage_error(
    prog: str, error: UsageError, world: bootstrap.World, settings: WatchdogSettings
) -> NoReturn:
    """Report a mistake once per node: others print only what the node's first rank does not see.

    The first rank to end makes the launcher end the rest, so the others wait. Other nodes may not
    see the mistake (a file that only one of them lacks): they read it in torchrun's store instead
    of waiting for this node to join.
    """
    several_nodes = world.local_size < world.size and "MASTER_ADDR" in os.environ
    if world.local_rank != 0:
        has_torch = several_nodes or "torch" in sys.modules  # ranks import it at their own pace
        time.sleep(FIRST_RANK_OF_NODES_S if has_torch else FIRST_RANK_S)
    report_usage_error(f"{prog}: error: {error}")
    bootstrap.tidy_temporary_folders(world, os.environ)  # the next start removes torchrun's
    if several_nodes:
        bootstrap.quiet_libraries()
        tell_other_nodes(world, error, settings)
    sys.exit(USAGE_ERROR)
