"""Checks a machine with one GPU or one NPU, stage by stage, and writes a file for a report.

    tools/device_check.sh                        # the device that is there; about five minutes
    tools/device_check.sh --platform cpu --task-steps 3
    tools/device_check.sh --stages trainer offload

Each group of stages is a process of its own with a time limit: what one cannot do does not end the
others, and where its packages are missing it is skipped and says so. Nothing is installed or
downloaded. The exit code is 1 if a stage failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import needs_environment  # noqa: F401

from device_check import report
from device_check.plan import JOBS, SIZES, STAGES, WHAT, CheckProcess, missing_modules
from device_check.results import Result, StageStatus, end_of, read_results
from mindspeed_rl.core.installed import ALLOW_VERSIONS
from mindspeed_rl.diagnosis.facts import guess_platform

DEVICE_FILE = "device.json"


def command_line(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the flags."""
    parser = argparse.ArgumentParser(
        "device_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--platform", choices=("auto", "cpu", "cuda", "npu"), default="auto",
        help="auto: by the devices of this machine (default)",
    )  # fmt: skip
    parser.add_argument(
        "--size", choices=tuple(SIZES), default="",
        help="model of the stages from trainer to steps (default: 0.5b, on a CPU tiny)",
    )  # fmt: skip
    parser.add_argument(
        "--stages", nargs="+", choices=STAGES, default=STAGES, metavar="STAGE",
        help=f"some of: {' '.join(STAGES)} (default: all); stages before them in their process "
        "run, too",
    )  # fmt: skip
    parser.add_argument("--task-steps", type=int, default=30, help="GRPO steps of the task (30)")
    parser.add_argument(
        "--warm-steps", type=int, default=45, help="supervised steps before the task (45)"
    )
    parser.add_argument(
        "--limit-s", type=float, default=300.0, help="limit of each process, in seconds (300)"
    )
    parser.add_argument(
        "--output", default="outputs/device_check", metavar="DIR",
        help="folder of the report (default: %(default)s)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    for name in ("task_steps", "warm_steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    if args.limit_s <= 0:
        parser.error(f"--limit-s {args.limit_s}: must be above 0")
    return args


def run_process(command: Sequence[str], log: Path, limit_s: float) -> str:
    """Run a process to its end or its limit; return what went wrong, empty if nothing did.

    At the limit it ends with all processes that it started.
    """
    environ = os.environ | {
        ALLOW_VERSIONS: "1",  # the doctor tells of them; the check goes on
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    with log.open("wb") as out:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environ,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"not finished after {limit_s:.0f} s (--limit-s)"
        finally:
            with suppress(ProcessLookupError):  # nothing of it is left
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if code < 0:
        return f"the process ended by {signal.Signals(-code).name}"
    return f"the process ended with exit code {code}" if code else ""


def run_job(job: CheckProcess, args: argparse.Namespace, folder: Path) -> tuple[list[Result], str]:
    """Run the stages of a job; return their results, and the end of its log if one failed."""
    if missing := missing_modules(job, args.platform):
        why = f"{' and '.join(missing)} not installed (docs/install.md)"
        return [Result(stage, StageStatus.SKIPPED, note=why) for stage in job.stages], ""
    log = folder / f"{job.name}.log"
    command = [
        sys.executable, "-m", "device_check.child", job.name, "--platform", args.platform,
        "--size", args.size, "--folder", str(folder), "--task-steps", str(args.task_steps),
        "--warm-steps", str(args.warm_steps),
    ]  # fmt: skip
    wrong = run_process(command, log, args.limit_s)
    known, results = read_results(folder), []
    if end := known.get(end_of(job.name)):
        wrong = end.note
    for stage in job.stages:
        result = known.get(stage)
        if result is None:
            why = f"not reached: {wrong or 'its process ended before'}"
            result = Result(stage, StageStatus.FAILED, note=why)
        elif result.status is StageStatus.STARTED:
            result = Result(stage, StageStatus.FAILED, note=wrong or "its process ended within it")
        results.append(result)
    failed = any(result.status is StageStatus.FAILED for result in results)
    return results, report.tail_of(log) if failed else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages and write the report."""
    args = command_line(argv)
    if args.platform == "auto":
        args.platform = guess_platform()
    args.size = args.size or ("tiny" if args.platform == "cpu" else "0.5b")
    output = Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    tails: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="device-check-") as made:
        folder = Path(made)
        for job in JOBS:
            if not set(job.stages) & set(args.stages):
                continue
            print(f"process {job.name}, at most {args.limit_s:.0f} s (--limit-s)", flush=True)
            for stage in job.stages:
                print(f"{stage}: {WHAT[stage]}", flush=True)
            found, tail = run_job(job, args, folder)
            print("\n".join(f"  {line}" for line in report.table(found)), flush=True)
            results += found
            if tail:
                tails[job.name] = tail
        opened = folder / DEVICE_FILE
        device = json.loads(opened.read_text()) if opened.exists() else {}
        facts = report.machine_facts(args.platform, device)
        tails = {name: report.tidy(tail, folder) for name, tail in tails.items()}
        tidied = [
            Result(r.stage, r.status, r.seconds, r.figures, report.tidy(r.note, folder))
            for r in results
        ]
        as_json, as_text = report.write_report(output, tidied, facts, tails)
    print("\n".join(["", *report.table(tidied), report.verdict(tidied)]))
    print(f"for a report, attach {as_json} or {as_text}")
    return int(any(result.status is StageStatus.FAILED for result in results))


if __name__ == "__main__":
    sys.exit(main())
