"""Runs the replay of a step, and says whether its numbers are those of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from mindspeed_rl.building.models import Models
from mindspeed_rl.checkpoint import resume as checkpoints
from mindspeed_rl.command_line.replay_run import recorded_flags
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.config.replay import ReplayConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.metrics.run_record import flag_values
from mindspeed_rl.planning.run_plan import RLPlan
from mindspeed_rl.replay.compare import changed_flags, differences
from mindspeed_rl.replay.outputs import (
    began_alike,
    comparable_metrics,
    dumped_rollouts,
    metric_lines,
    require_step,
    rollout_lines,
    trained_steps,
)
from mindspeed_rl.replay.record import StepRecord, read_record, save_record
from mindspeed_rl.replay.recorder import StepRecorder
from mindspeed_rl.rl import resume
from mindspeed_rl.rl.components import Components, RunState
from mindspeed_rl.rl.report import RunReporter
from mindspeed_rl.rl.sync import check_engine
from mindspeed_rl.trainer.train_engine import TrainEngine

if TYPE_CHECKING:
    from mindspeed_rl.launch.job import Job

RECORD = "record.npz"
_TOLERANCE, _TOLERANCE_BF16 = 1e-4, 5e-2
_MOST_TOLD = 3
TrainStep = Callable[[Components, RunState, RunReporter, int], None]


def check(job: Job[RLRunConfig, RLPlan]) -> None:
    """Check what a replay reads, before anything is built. Local.

    Raises:
        UsageError: The folder is no run, the run has not done the step, or the record to compare
            with is none of this step.
    """
    options = job.config.replay
    require_step(options.run_folder, options.step)
    if (reference := reference_of(options)) is not None:
        _record_to_compare(reference, options.step)


def replay(run: Components, train_step: TrainStep) -> None:
    """Run the steps up to that of ``--replay`` and compare what it gave. Collective: the world.

    Args:
        run: Parts of the run.
        train_step: Does one step of the run, without what comes between steps.

    Raises:
        RuntimeError: Numbers differ; rank 0 has said which.
    """
    last = run.config.replay.step
    state, report = resume.start(run)
    start = state.step
    steps = f"steps {start + 1} to {last}" if start + 1 < last else f"step {last}"
    run.job.log_rank0(f"replay: {steps}, into {run.config.logging.output_dir}")
    check_engine(run, state)
    run.telemetry.timer.finish_step()
    for step in range(start + 1, last):
        train_step(run, state, report, step)
    recorder = StepRecorder(models_by_role(run.models))
    with recorder.recording():
        train_step(run, state, report, last)
    with run.phase("compare"):
        stages = recorder.stages(run.job.world.rank)
        answer = [""]
        if run.job.world.rank == 0:
            run.telemetry.logger.close()
            run.telemetry.dump.close()
            flags = recorded_flags(run.config)
            record = StepRecord(last, layout_sizes(run.plan), flags, stages)
            answer[0] = _conclude(run, record, start)
        dist.broadcast_object_list(answer, 0)
    if answer[0]:
        raise RuntimeError(answer[0])


def models_by_role(models: Models) -> dict[str, TrainEngine]:
    """Return the models that a run has, by role."""
    others = (models.reference, models.critic, models.reward_model, *models.teachers.values())
    found = (models.policy, *others)
    return {model.role: model for model in found if isinstance(model, TrainEngine)}


def layout_sizes(plan: RLPlan) -> dict[str, int]:
    """Return the sizes of training and rollout layout, named as in a checkpoint."""
    parallel, engine = plan.parallel, plan.engine
    return {
        "tp": parallel.tp,
        "pp": parallel.pp,
        "cp": parallel.cp,
        "dp": parallel.dp,
        "vpp": parallel.stages.vpp,
        "ep": parallel.ep,
        "etp": parallel.etp,
        "engines": engine.num_groups,
        "engine_tp": engine.tp,
        "engine_dp": engine.dp,
    }


@dataclass(frozen=True, slots=True)
class ReplayComparison:
    """The result of comparing a replay with one thing.

    Attributes:
        other: What it was compared with: the folder of the run, or a record.
        compared: Numbers of what was compared, in words.
        lines: Differences in words, the first one first; empty: there are none.
        notes: What may explain them.
    """

    other: str
    compared: str
    lines: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def report(self) -> list[str]:
        """Return what to tell of it, the first difference first."""
        if not self.lines:
            return [f"equal to {self.other} in {self.compared}"]
        head = [f"first difference from {self.other}: {self.lines[0]}"]
        rest = [f"then {line}" for line in self.lines[1 : 1 + _MOST_TOLD]]
        more = len(self.lines) - 1 - _MOST_TOLD
        return [*head, *rest, *([f"and {more} more"] if more > 0 else []), *self.notes]


def _conclude(run: Components, record: StepRecord, start: int) -> str:
    """Compare with the run and with an earlier record, keep the record, and say what was found.

    Local, on rank 0.

    Returns:
        A sentence on the first difference; empty where all is equal.
    """
    options = run.config.replay
    found = [_with_run(run, record, start)]
    if (reference := reference_of(options)) is not None:
        found.append(_with_record(run.config, record, reference))
    kept = new_record_path(options.folder)
    save_record(record, kept)
    name = f"replay of step {record.step}"
    different = [one for one in found if one.lines]
    if not different:
        told = ", ".join(line for one in found for line in one.report())
        run.job.log_rank0(f"{name}: {told}; record: {kept}")
        return ""
    for one in found:
        run.job.log_rank0(*(f"{name}: {line}" for line in one.report()))
    run.job.log_rank0(f"{name}: record: {kept}")
    # A record knows the order of the computation; the outputs of a run have only its results.
    last = different[-1]
    return f"{name} differs from {last.other}, first in {last.lines[0]}"


def _with_record(config: RLRunConfig, record: StepRecord, path: Path) -> ReplayComparison:
    """Compare with the record of another replay of the step."""
    earlier = _record_to_compare(path, record.step)
    tolerance = tolerance_of(config, same_layout(record.layout, earlier.layout))
    lines = tuple(str(d) for d in differences(record, earlier, tolerance))
    flags = ", ".join(changed_flags(record.flags, earlier.flags))
    notes = (f"flags that differ from that record: {flags}",) if flags else ()
    return ReplayComparison(str(path), f"{record.num_values} values", lines, notes)


def _with_run(run: Components, record: StepRecord, start: int) -> ReplayComparison:
    """Compare with the metrics of all steps that were run again, and the rollouts of the last."""
    options = run.config.replay
    same = _is_layout_of_run(run.config, record.layout, run.job.world.size)
    tolerance = tolerance_of(run.config, same)
    theirs, mine = trained_steps(options.run_folder), trained_steps(options.folder)
    lines: list[str] = []
    num_metrics = 0
    for step in range(start + 1, record.step + 1):
        if step not in theirs:
            continue
        ours = comparable_metrics(mine[step], any_layout=not same)
        known = comparable_metrics(theirs[step], any_layout=not same)
        num_metrics = len(known)
        lines = metric_lines(ours, known, tolerance)
        if lines and step < record.step:
            text = f"step {step} differs already, so replay that one: {lines[0]}"
            return ReplayComparison(str(options.run_folder), "", (text,))
    sampled = dumped_rollouts(options.folder, record.step)
    dumped = dumped_rollouts(options.run_folder, record.step)
    num_rollouts = len(sampled.keys() & dumped.keys())
    return ReplayComparison(
        str(options.run_folder),
        f"{num_metrics} metrics and {num_rollouts} rollouts",
        (*rollout_lines(sampled, dumped, tolerance), *lines),
    )


def tolerance_of(config: RLRunConfig, same: bool) -> float:
    """Return the largest relative difference that counts as equal, see ``--replay-tolerance``."""
    given = config.replay.replay_tolerance
    if given is not None:
        return given
    if same:
        return 0.0
    bf16 = config.train.bf16 or config.rollout.engine_is_bf16(config.train)
    return _TOLERANCE_BF16 if bf16 else _TOLERANCE


def same_layout(mine: Mapping[str, int], other: Mapping[str, int]) -> bool:
    """Whether two layouts have the same sizes, as far as both are known."""
    return all(mine[name] == other[name] for name in mine.keys() & other.keys())


def _is_layout_of_run(config: RLRunConfig, mine: Mapping[str, int], num_ranks: int) -> bool:
    """Whether the run had this layout when it began, or saved what the replay started from."""
    options = config.replay
    if options.step == 1:
        return began_alike(options.run_folder, num_ranks, flag_values(config))
    path = checkpoints.find_latest(config.checkpoint.load, before=options.step).path
    assert path is not None, "the replay started from it"
    saved = checkpoints.read_record(path)
    theirs = dict(saved.layout)
    if "num_groups" in saved.extra:
        theirs["engines"] = saved.extra["num_groups"]
    return same_layout(mine, theirs)


def reference_of(options: ReplayConfig) -> Path | None:
    """Return the record to compare with: the one that is named, else the first of the step."""
    if options.replay_compare:
        return Path(options.replay_compare)
    first = options.folder / RECORD
    return first if first.is_file() else None


def new_record_path(folder: Path) -> Path:
    """Return the path of the next record of a folder: records are never replaced."""
    path, number = folder / RECORD, 1
    while path.exists():
        number += 1
        path = folder / f"record-{number}.npz"
    return path


def _record_to_compare(path: str | Path, step: int) -> StepRecord:
    record = read_record(path)
    if record.step != step:
        raise UsageError(
            f"--replay-compare {path}: the record is of step {record.step}, the replay of step "
            f"{step}; name a record of the same step"
        )
    return record
