"""What observes a run of RL or of supervised training: timer, profiler, logger, progress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_rl.config import TrainingRunConfig
from mindspeed_rl.config.kernels import experts_note, modules_note
from mindspeed_rl.config.outputs import TENSORBOARD_FOLDER
from mindspeed_rl.metrics.loggers import MetricBackend, RunLogger, TensorBoardBackend
from mindspeed_rl.metrics.profiler import StepProfiler
from mindspeed_rl.metrics.progress import RunProgress
from mindspeed_rl.metrics.run_record import as_markdown, flag_values
from mindspeed_rl.metrics.timers import PhaseTimer
from mindspeed_rl.metrics.trackers import make_trackers

if TYPE_CHECKING:
    from mindspeed_rl.launch.job import Job
    from mindspeed_rl.launch.watchdog import Watchdog
    from mindspeed_rl.planning.run_plan import RunPlan


@contextmanager
def named_phase(
    timer: PhaseTimer, watchdog: Watchdog, name: str, limit_s: float | None = None
) -> Iterator[None]:
    """Run the body as the named phase of a timer and a watchdog, whose limit is the phase's own."""
    with timer(name), watchdog.phase(name, limit_s):
        yield


def log_description(job: Job[Any, RunPlan], *lines: str) -> None:
    """Log at the start what will run.

    Args:
        job: Job of the run; its training layout, kind of modules and what became of its flags are
            logged.
        lines: What this kind of run adds to that.
    """
    parallel = job.config.parallel
    layout = job.plan.parallel.describe(
        experts=job.plan.spec.moe is not None, sequence_parallel=parallel.shards_sequence
    )
    modules = modules_note(job.config.model, parallel.platform)
    trainer = f"training layout on {job.platform.name}: {layout}"
    modules += experts_note(job.config.model, job.platform.name)
    job.log_rank0(trainer, *modules, *lines, *job.flag_notes)


def open_timer(job: Job[Any, Any]) -> tuple[PhaseTimer, StepProfiler]:
    """Return the timer of phases and the profiler, whose traces show these phases. Local."""
    config, platform = job.config, job.platform
    profiler = StepProfiler(config.profiler, platform, job.world.rank, config.logging.output_dir)
    return PhaseTimer(platform, mark=profiler.phase), profiler


def open_logger(config: TrainingRunConfig, rank: int) -> RunLogger:
    """Open the logger of metrics, which writes on rank 0 only."""
    logs, others = config.logging, list[MetricBackend]()
    if rank == 0:
        folder = logs.tensorboard_dir or Path(logs.output_dir) / TENSORBOARD_FOLDER
        trackers = make_trackers(config.trackers, logs.output_dir, asdict(config))
        description = as_markdown(flag_values(config))
        others = [TensorBoardBackend(folder, description), *trackers]
    return RunLogger(logs.output_dir, rank == 0, others, config.checkpoint.save_best_metric)


def open_progress(config: TrainingRunConfig, start: int, name: str, rank: int) -> RunProgress:
    """Open the progress line of a run, which rank 0 shows, after ``start`` steps."""
    steps, interval = config.train.train_iters, config.logging.log_interval
    return RunProgress(steps, start, name, rank == 0, log_interval=interval)
