"""The process of a job: ``python -m device_check.child JOB ...``, started by the check itself."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from device_check.plan import JOBS, SIZES, Size
from device_check.results import Recorder, StageFailed, described
from mindspeed_rl.core.errors import UsageError

# Registered at exit before what libraries register, so that it runs last.
from mindspeed_rl.core.process_end import end_process


@dataclass(frozen=True, slots=True)
class Setting:
    """What the stages of a process are told.

    Attributes:
        platform: ``cpu``, ``cuda`` or ``npu``.
        size: Model and work.
        folder: Folder for models, data and results.
        task_steps: GRPO steps of the task.
        warm_steps: Supervised steps before them.
    """

    platform: str
    size: Size
    folder: Path
    task_steps: int
    warm_steps: int

    @property
    def half(self) -> bool:
        """Whether models are in bfloat16, as on every device but the host."""
        return self.platform != "cpu"


def run(job: str, setting: Setting, recorder: Recorder) -> None:
    """Run the stages of a job; heavy packages are imported by those that need them."""
    if job in ("doctor", "steps", "task"):
        from device_check import runs

        {"doctor": runs.doctor, "steps": runs.steps, "task": runs.task}[job](setting, recorder)
    elif job == "arithmetic":
        from device_check.arithmetic import arithmetic

        arithmetic(setting, recorder)
    else:
        from device_check import models

        {"trainer": models.trainer_job, "engine": models.engine_job}[job](setting, recorder)


def main() -> int:
    """Parse the flags and run."""
    parser = argparse.ArgumentParser("device_check.child")
    parser.add_argument("job", choices=[job.name for job in JOBS])
    parser.add_argument("--platform", required=True)
    parser.add_argument("--size", required=True, choices=tuple(SIZES))
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("--task-steps", required=True, type=int)
    parser.add_argument("--warm-steps", required=True, type=int)
    args = parser.parse_args()
    setting = Setting(
        args.platform, SIZES[args.size], args.folder, args.task_steps, args.warm_steps
    )
    recorder = Recorder(args.folder)
    try:
        run(args.job, setting, recorder)
    except BaseException as error:
        recorder.ended(args.job, described(error))
        if not isinstance(error, (StageFailed, UsageError)):
            raise
        print(error)
        return 1
    end_process()
    return 0


if __name__ == "__main__":
    sys.exit(main())
