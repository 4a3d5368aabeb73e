"""Runs a rank of a job, from a checked command line to its end."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mindspeed_rl.command_line.arguments import ParsedArguments, Run
from mindspeed_rl.command_line.dispositions import disposition_lines
from mindspeed_rl.command_line.settings import settings_lines
from mindspeed_rl.compat.architecture import check_foreign_architecture
from mindspeed_rl.config import PretrainRunConfig, RLRunConfig, ScoreRunConfig
from mindspeed_rl.config.architecture import check_architecture, model_config, positions_note
from mindspeed_rl.config.kernels import experts_note, module_names
from mindspeed_rl.config.npu import NpuSetup, check_npu, group_buffers, npu_setup
from mindspeed_rl.config.outputs import refuse_results_of_others
from mindspeed_rl.core.errors import Mistakes, UsageError
from mindspeed_rl.core.installed import probable_platform, resolve_platform
from mindspeed_rl.core.redaction import redacted_text
from mindspeed_rl.engines.registry import engine_provider
from mindspeed_rl.flag_checks.absent_files import absent_files
from mindspeed_rl.launch import attempt, bootstrap, machine, run_lock
from mindspeed_rl.launch.cores import bind_cores
from mindspeed_rl.launch.failures import JOIN, WatchdogSettings
from mindspeed_rl.launch.start_up import stage
from mindspeed_rl.models.param_names import LOCAL
from mindspeed_rl.models.registry import spec_from_hf_config, weight_table
from mindspeed_rl.models.tensors import num_parameters
from mindspeed_rl.planning.budget import machine_on, npu_machine
from mindspeed_rl.planning.expert_dispatch import check_expert_map
from mindspeed_rl.planning.hccl_buffers import hccl_buffers, with_group_sizes
from mindspeed_rl.planning.phase_limits import PhaseLimits, phase_limits
from mindspeed_rl.planning.run_plan import RLPlan, RunPlan, check_engine

if TYPE_CHECKING:
    from mindspeed_rl.launch.watchdog import Watchdog
    from mindspeed_rl.platforms.base import Platform

Plan_co = TypeVar("Plan_co", covariant=True)

ONE_RANK = (
    "--rl-dry-run: neither --rl-world-size nor WORLD_SIZE says how many ranks there are, so a run "
    "of one rank is assumed; --rl-world-size N (nodes x ranks per node) predicts another"
)
"""What a dry run says that assumes the number of ranks."""


@dataclass(frozen=True, slots=True)
class Job(Generic[Run, Plan_co]):
    """The arguments of an entry's main function.

    ``command_line`` is what was typed, ``ignored`` are the flags of it that have no effect here,
    ``flag_notes`` lines about what became of all flags. A collective may take ``timeout_minutes``:
    what ``--distributed-timeout-minutes`` says, or as long as the longest phase if that is more.
    """

    config: Run
    plan: Plan_co
    world: bootstrap.World
    platform: Platform
    watchdog: Watchdog
    ignored: tuple[str, ...]
    timeout_minutes: int
    flag_notes: tuple[str, ...] = ()
    command_line: tuple[str, ...] = ()

    def log_rank0(self, *lines: str) -> None:
        """Print lines on rank 0, secrets hidden, above the bar that shows the progress."""
        from tqdm import tqdm

        if self.world.rank == 0:
            for line in lines:
                tqdm.write(redacted_text(line))
            sys.stdout.flush()


@dataclass(frozen=True, slots=True)
class Checked(Generic[Run, Plan_co]):
    """A command line that passed its checks for a number of ranks."""

    parsed: ParsedArguments[Run]
    plan: Plan_co
    setup: NpuSetup | None


def plan_run(
    parsed: ParsedArguments[Run], plan: Callable[[Run, int], Plan_co], num_ranks: int
) -> Checked[Run, Plan_co]:
    """Find the user's mistakes, and plan the run, before anything heavy is imported. Local.

    On NPUs the configuration that is returned says how the engine decodes, and how large HCCL's
    buffers are.

    Raises:
        UsageError: There are some; the message has all of flags that are refused or contradict the
            model or the platform, and the first of the rest.
    """
    mistakes = Mistakes(parsed.refused)
    check_model_flags(parsed, mistakes, files=True)
    with mistakes:
        setup = npu_setup_of(parsed)
    with mistakes:
        planned = plan(parsed.config, num_ranks)
        platform = resolve_platform(parsed.config.parallel.platform)
        if platform != "auto":  # else torch must be asked, and the run checks then
            check_engine(parsed.config, planned, platform)
    mistakes.report()
    if setup is not None:
        parsed, setup = sized_for_npu(parsed, planned, setup)
    return Checked(parsed, planned, setup)


def predict(parsed: ParsedArguments[Any], environment: Mapping[str, str]) -> int:
    """Run the dry run of an entry and return its exit code.

    Raises:
        UsageError: As of :func:`plan_run`, but for what depends on this machine.
    """
    if find_spec("numpy") is None:
        raise UsageError("--rl-dry-run needs the package numpy: pip install numpy")
    from mindspeed_rl.planning.dry_run import dry_run
    from mindspeed_rl.planning.findings import asks_for_ranks, is_world_assumed, world_size
    from mindspeed_rl.planning.suggestions import plan_of

    config = parsed.config
    mistakes = Mistakes(parsed.refused)
    check_model_flags(parsed, mistakes, files=False)
    platform = machine_on(config).platform
    with mistakes:
        check_npu(config.ascend, config.parallel, platform)
    assumed = (ONE_RANK,) if is_world_assumed(config, environment) else ()
    with mistakes:
        plan = plan_of(config, world_size(config, environment))
        check_engine(config, plan, platform)
    mistakes.report(assumed if asks_for_ranks(config) else ())
    notes = [
        *assumed,
        *absent_files(config),
        *flag_lines(parsed, plan, parsed.ignored),
        *experts_note(config.model, platform),
        phase_limits(config, plan, platform).line(),
    ]
    return dry_run(config, environment, notes)


def flag_lines(parsed: ParsedArguments[Any], plan: object, ignored: Sequence[str]) -> list[str]:
    """Return by which numbers a run learns, and what became of the flags of its command line."""
    config, lines = parsed.config, disposition_lines(parsed, ignored)
    if not isinstance(plan, RunPlan):
        return lines
    lines += positions_note(config.model, plan.spec)
    if not isinstance(config, RLRunConfig):
        return lines
    return settings_lines(config, num_parameters(plan.spec)) + lines


def limits_of(checked: Checked[Run, Plan_co]) -> PhaseLimits:
    """Return the limits of the phases of a run."""
    config: Any = checked.parsed.config
    assert isinstance(checked.plan, RunPlan)
    return phase_limits(config, checked.plan, probable_platform(config.parallel.platform))


def has_engine(config: object) -> bool:
    """Whether a run builds an inference engine: not warm starts, nor scores of the trainer."""
    if isinstance(config, ScoreRunConfig):
        return config.score.backend == "engine"
    return isinstance(config, RLRunConfig)


def prepare_rank(checked: Checked[Run, Plan_co]) -> list[str]:
    """Prepare the environment of this process and check its machine, before it meets others.

    Local; on an NPU torch and torch_npu are imported.

    Returns:
        Notes on the user's settings that were changed, with reasons.

    Raises:
        UsageError: This machine cannot run the job.
    """
    parallel = checked.parsed.config.parallel
    platform: str = parallel.platform
    setup: NpuSetup = checked.setup or NpuSetup()
    changed: list[str] = bootstrap.prepare_environment(
        platform,
        os.environ,
        deterministic=setup.deterministic,
        buffer_mb=setup.buffer_mb,
        longest_phase_s=limits_of(checked).longest,
    )
    changed += bind_cores(parallel.bind_cores, platform, os.environ)
    if checked.parsed.config.logging.log_level == "info":
        bootstrap.quiet_libraries()
    machine.check_machine(platform, os.environ, engine=has_engine(checked.parsed.config))
    return [*changed, *machine.unused_devices(platform), *setup.notes]


def run_job(
    prog: str,
    checked: Checked[Run, Plan_co],
    world: bootstrap.World,
    main: Callable[[Job[Run, Plan_co]], None],
    settings: WatchdogSettings,
    notes: Sequence[str] = (),
) -> None:
    """Import torch, meet the other ranks, run ``main``, and end together with the others.

    A failure ends the process. Collective: the world. ``notes``: Result of :func:`prepare_rank`.
    """
    config = checked.parsed.config
    parallel = config.parallel
    limits = limits_of(checked)
    if isinstance(config, RLRunConfig | PretrainRunConfig):
        settings = replace(settings, saves_at_sigterm=config.checkpoint.exit_signal_handler)
    bootstrap.tidy_temporary_folders(world, os.environ)
    attempt.note_process()
    watchdog = _start_watchdog(prog, world, limits, settings)
    try:
        # From here on ranks learn of a failure of others, even while they wait for them to join.
        minutes = parallel.distributed_timeout_minutes
        with watchdog.phase(JOIN, timeout_s=60.0 * minutes):
            # A rank may wait in a collective for as long as another one is in a phase.
            minutes = max(minutes, math.ceil(limits.longest / 60))
            tell = _nowhere if world.rank else _print
            with stage(tell, "start of torch and its process group"):
                platform = bootstrap.start(
                    parallel.platform, minutes, world, checked.setup, engine=has_engine(config)
                )
            parsed, again = _in_attempt_of_all(checked.parsed, watchdog)
        config = parsed.config
        attempt.mark("up")
        check_modules(checked.plan, platform)
        ignored = ignored_flags(parsed, platform)
        flag_notes = tuple(flag_lines(parsed, checked.plan, ignored))
        job = Job(
            *(config, checked.plan, world, platform, watchdog, ignored, minutes, flag_notes),
            command_line=parsed.typed,
        )
        job.log_rank0(*notes, *again, *_lock_folders(config, world), limits.line())
        bootstrap.seed_everything(config.train.seed)
        main(job)
        watchdog.leave()
        run_lock.release()
        if engine_provider().package not in sys.modules:  # else the engine's exit handler does it
            import torch.distributed as dist

            dist.destroy_process_group()
    except BaseException as error:
        watchdog.fail(error)


def _in_attempt_of_all(
    parsed: ParsedArguments[Run], watchdog: Watchdog
) -> tuple[ParsedArguments[Run], list[str]]:
    """Return the command line of the attempt that all nodes are in, and lines about it.

    A node that was started again, while the others restarted the job, learns of it here.

    Raises:
        UsageError: It is the first attempt, and ``--output-dir`` holds the results of another run.
    """
    lines, num_nodes = list[str](), int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    if num_nodes > 1:
        newest = watchdog.newest_attempt(num_nodes)
        if newest.restarts > attempt.number_of_restarts():
            newest.join()
            parsed, lines = attempt.continued(parsed, os.environ)
        if isinstance(parsed.config, RLRunConfig | PretrainRunConfig):
            refuse_results_of_others(parsed.config)
    return parsed, lines


def _print(line: str) -> None:
    print(line, flush=True)  # tqdm, which a job prints with, would be imported before torch


def _nowhere(line: str) -> None:
    """Print nothing: rank 0 prints for all."""


def _lock_folders(config: object, world: bootstrap.World) -> list[str]:
    """Lock the folders that a run writes to, on rank 0; return lines about them.

    Raises:
        UsageError: Another run that is alive has one of them, or writes to ``--load``.
    """
    if world.rank or not isinstance(config, RLRunConfig | PretrainRunConfig):
        return []
    folders = {"--output-dir": config.logging.output_dir, "--save": config.checkpoint.save}
    named = {flag: path for flag, path in folders.items() if path}
    wait_s = run_lock.LEASE_S if attempt.number_of_restarts() else 0.0  # of a machine that is lost
    lines = run_lock.lock_folders(named, folders["--output-dir"], wait_s)
    replays = isinstance(config, RLRunConfig) and config.replay.active  # also of a running run
    if config.checkpoint.load and not replays:
        run_lock.refuse_living_run("--load", config.checkpoint.load)
    return lines


def check_modules(plan: object, platform: Platform) -> None:
    """Refuse modules of a device on a CPU. Local.

    Raises:
        UsageError: ``--platform auto`` was planned for a GPU that torch does not see.
    """
    if platform.name == "cpu" and isinstance(plan, RunPlan) and plan.megatron.modules != LOCAL:
        raise UsageError(
            "--platform auto: this machine has NVIDIA's driver and Transformer Engine, but torch "
            "sees no GPU; show it one (CUDA_VISIBLE_DEVICES), or add --platform cpu"
        )


def tell_other_nodes(world: bootstrap.World, error: UsageError, settings: WatchdogSettings) -> None:
    """Publish a mistake that this rank found before it joined the other nodes. Local."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # the mistake may be what torch loads
    from mindspeed_rl.launch.failure_store import publish_usage_error

    publish_usage_error(world, str(error), settings)


def ignored_flags(parsed: ParsedArguments[Any], platform: Platform) -> tuple[str, ...]:
    """Return the flags that were accepted but have no effect, or none on this device."""
    features = platform.transformer_features()
    idle = parsed.config.kernels.idle_flags(
        features.obeys_kernel_flags, features.overlaps_shared_experts
    )
    return (*parsed.ignored, *idle)


def npu_setup_of(parsed: ParsedArguments[Any]) -> NpuSetup | None:
    """Return the settings of an NPU process; ``None`` on other platforms."""
    config = parsed.config
    platform = resolve_platform(config.parallel.platform)
    check_npu(config.ascend, config.parallel, platform)
    if platform != "npu":
        return None
    grouped = module_names(config.model, config.parallel.platform).grouped_experts
    ascend = config.ascend
    if config.kernels.moe_permute_fusion:
        ascend = replace(ascend, use_fused_moe_token_permute_and_unpermute=True)
    return npu_setup(ascend, config.parallel, config.train, grouped=grouped)


def sized_for_npu(
    parsed: ParsedArguments[Run], plan: object, setup: NpuSetup
) -> tuple[ParsedArguments[Run], NpuSetup]:
    """Settle what NPUs leave open: graph mode, and HCCL's buffers. Local.

    Raises:
        UsageError: ``HCCL_BUFFSIZE`` of the environment is too small, or the machine dispatches
            tokens to wrong experts.
    """
    config: Any = parsed.config
    assert isinstance(plan, RunPlan)
    machine_name = npu_machine(config).name
    check_expert_map(plan, machine_name)
    if isinstance(config, RLRunConfig) and isinstance(plan, RLPlan):
        tuning, why = engine_provider().tuning(config.engine, plan.engine, "npu")
        config = replace(config, engine=tuning)
        if why:
            note = f"--rollout-graph-mode auto is {tuning.rollout_graph_mode}: {why}"
            setup = replace(setup, notes=(*setup.notes, note))
    buffers = hccl_buffers(config, plan, machine_name, os.environ)
    if buffers.raised:
        config = with_group_sizes(config, buffers)
        sizes = group_buffers(config.ascend.hccl_group_buffer)
        setup = replace(setup, group_buffers_mb=sizes, buffer_mb=buffers.process_mb)
    return replace(parsed, config=config), setup


def check_model_flags(parsed: ParsedArguments[Any], mistakes: Mistakes, *, files: bool) -> None:
    """Compare all architecture flags of the command line with the model.

    Args:
        parsed: A parsed command line.
        mistakes: Gets what contradicts the model.
        files: Whether the checkpoint must be complete; without, see :func:`model_config`.
    """
    config = parsed.config
    with mistakes:
        hf_config = model_config(config.model.hf_checkpoint, "--hf-checkpoint", files=files)
        with mistakes:
            check_script(parsed, hf_config)
        spec = spec_from_hf_config(hf_config)
        check_architecture(config.model, spec, config.parallel.tensor_model_parallel_size)


def check_script(parsed: ParsedArguments[Any], hf_config: dict[str, Any]) -> None:
    """Compare the foreign architecture flags of the script with the model."""
    spec = spec_from_hf_config(hf_config)
    implied = dict(weight_table(spec.family).config_keys)
    properties = {"spec.qk_norm": any(attention.qk_norm for attention in spec.attentions)}
    check_foreign_architecture(parsed.checked_arch, implied | hf_config | properties)


def _start_watchdog(
    prog: str, world: bootstrap.World, limits: PhaseLimits, settings: WatchdogSettings
) -> Watchdog:
    from mindspeed_rl.launch.watchdog import Watchdog

    try:
        watchdog = Watchdog(world, limits, prog, settings)
    except RuntimeError as error:
        if world.local_rank == 0:
            print(f"{prog}: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    watchdog.start()
    return watchdog
