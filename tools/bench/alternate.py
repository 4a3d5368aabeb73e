r"""Seconds per step of two running jobs, which take turns on this machine: A, B, B, A, ...

    python tools/bench/alternate.py \
        --job /tmp/a/metrics.jsonl "bash my_job.sh --output-dir /tmp/a" \
        --job /tmp/b/metrics.jsonl "bash my_job.sh --output-dir /tmp/b --micro-batch-size 512"

A job is a file that grows by one line per step, which is removed at first, and the command that
writes it, which bash runs in the current folder. Both start together and run until each has made
--warm-steps. Then one is stopped (SIGSTOP) while the other goes on for --window seconds, and so on
in turns, so that a machine whose speed drifts is as fast for one as for the other. In the end both
are killed: give them more steps than they can make. Memory must hold both at once, and two windows
be shorter than the silence after which a job takes its own ranks for dead (ours: 40 s).

Printed for both and as ratio B/A: steps made; seconds per step, which are all seconds of the
windows by all steps made in them; processor seconds per step, of all processes of the job. The
ratio of the seconds has the standard error over the pairs of windows. The last line is RESULT and a
JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

START_LIMIT_S = 600.0
_SETTLE_S = 0.1  # a stopped process leaves its core to the other


@dataclass(slots=True)
class Turns:
    """What a job did while it was its turn.

    Attributes:
        steps: made in each window.
        seconds: of each window.
        cpu_seconds: of all processes, in all windows.
    """

    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0

    @property
    def seconds_per_step(self) -> float:
        """Over all windows: a step that a window cuts is counted where it ends."""
        return sum(self.seconds) / sum(self.steps)

    @property
    def cpu_per_step(self) -> float:
        """Of all ranks together."""
        return self.cpu_seconds / sum(self.steps)


class RunningJob:
    """A command with all its processes, in a session of its own.

    Args:
        steps: file that grows by a line per step; removed at first.
        command: for bash.
        log: where its output goes.
    """

    def __init__(self, steps: Path, command: str, log: Path) -> None:
        steps.unlink(missing_ok=True)
        self._steps, self._log = steps, log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                ["bash", "-c", command], stdout=out, stderr=out, start_new_session=True
            )
        self._launcher = psutil.Process(self._process.pid)
        self._known = [self._launcher]
        self.turns = Turns()

    def processes(self) -> list[psutil.Process]:
        """Of the job: its launcher, then its descendants, also of a launcher that is gone."""
        known = dict.fromkeys(self._known)
        for process in self._known[:1] if _lives(self._launcher) else self._known:
            with suppress(psutil.NoSuchProcess):
                known.update(dict.fromkeys(process.children(recursive=True)))
        self._known = [process for process in known if _lives(process)]
        return list(self._known)

    def num_steps(self) -> int:
        """Made so far.

        Raises:
            RuntimeError: the job has ended.
        """
        if self._process.poll() is not None:
            tail = self._log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"a job ended ({self._process.returncode}); its output:\n{tail}")
        try:
            return self._steps.read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def send(self, number: signal.Signals) -> None:
        """A signal to every process."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _cpu_seconds(self) -> float:
        """Of all processes; the time of one that has ended is with its parent."""
        found = 0.0
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                found += times.user + times.system
                found += times.children_user + times.children_system
        return found

    def take_turn(self, seconds: float) -> None:
        """Go on for so long."""
        steps, cpu, start = self.num_steps(), self._cpu_seconds(), time.monotonic()
        self.send(signal.SIGCONT)
        time.sleep(seconds)
        self.send(signal.SIGSTOP)
        self.turns.seconds.append(time.monotonic() - start)
        time.sleep(_SETTLE_S)
        self.turns.steps.append(self.num_steps() - steps)
        self.turns.cpu_seconds += self._cpu_seconds() - cpu

    def kill(self) -> None:
        """With all its processes, stopped or not."""
        while self.processes():  # some may start others until they are dead themselves
            self.send(signal.SIGKILL)
            time.sleep(_SETTLE_S)
        self._process.wait()


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


@contextmanager
def running(jobs: Sequence[tuple[str, str]]) -> Iterator[list[RunningJob]]:
    """Start the jobs; none outlives this."""
    started: list[RunningJob] = []
    with tempfile.TemporaryDirectory(prefix="alternate-") as folder:
        try:
            for i, (steps, command) in enumerate(jobs):
                started.append(RunningJob(Path(steps), command, Path(folder) / f"{i}.log"))
            yield started
        finally:
            for job in started:
                job.kill()


def alternate(jobs: Sequence[RunningJob], window_s: float, rounds: int) -> None:
    """Let two jobs that make steps take turns."""
    for job in jobs:
        job.send(signal.SIGSTOP)
    time.sleep(_SETTLE_S)
    for number in range(rounds):
        order = jobs if number % 2 == 0 else tuple(reversed(jobs))
        for job in order:
            job.take_turn(window_s)
        print(f"round {number + 1}/{rounds}", file=sys.stderr, flush=True)


def compare(a: Turns, b: Turns) -> dict[str, float]:
    """B by A.

    Returns:
        ``seconds``: of the seconds per step; ``standard_error``: of that ratio, from the windows in
        pairs, NaN where one of them saw no step; ``cpu_seconds``: of the processor seconds per
        step.

    Raises:
        RuntimeError: a job made no step.
    """
    if not (sum(a.steps) and sum(b.steps)):
        raise RuntimeError("no window of a job saw a step end: make --window longer")
    ratio = b.seconds_per_step / a.seconds_per_step
    spread = math.nan
    if all((*a.steps, *b.steps)) and len(a.steps) > 1:
        pairs = zip(a.seconds, a.steps, b.seconds, b.steps, strict=True)
        logs = [math.log(tb / nb / (ta / na)) for ta, na, tb, nb in pairs]
        spread = statistics.stdev(logs) / math.sqrt(len(logs))
    return {
        "seconds": ratio,
        "standard_error": ratio * spread,
        "cpu_seconds": b.cpu_per_step / a.cpu_per_step,
    }


def report(a: Turns, b: Turns) -> str:
    """A table, and the line for programs."""
    ratio = compare(a, b)
    rows = [
        ("", "A", "B", "B/A"),
        ("steps", f"{sum(a.steps)}", f"{sum(b.steps)}", ""),
        (
            "seconds per step",
            f"{a.seconds_per_step:.4f}",
            f"{b.seconds_per_step:.4f}",
            f"{ratio['seconds']:.3f} +- {ratio['standard_error']:.3f}",
        ),
        (
            "processor seconds per step",
            f"{a.cpu_per_step:.4f}",
            f"{b.cpu_per_step:.4f}",
            f"{ratio['cpu_seconds']:.3f}",
        ),
    ]
    table = "\n".join(f"{n:<28}{x:>10}{y:>10}  {r}" for n, x, y, r in rows)
    about = [
        {"steps": sum(t.steps), "seconds": t.seconds_per_step, "cpu_seconds": t.cpu_per_step}
        for t in (a, b)
    ]
    return f"{table}\nRESULT {json.dumps({'a': about[0], 'b': about[1], 'ratio': ratio})}"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--job",
        nargs=2,
        action="append",
        required=True,
        metavar=("STEPS_FILE", "COMMAND"),
        help="give it twice: A, then B",
    )
    parser.add_argument("--window", type=float, default=8.0, help="seconds of a turn (8)")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each job (10)")
    parser.add_argument("--warm-steps", type=int, default=12, help="steps before the first (12)")
    args = parser.parse_args(argv)
    if len(args.job) != 2:
        parser.error(f"--job: given {len(args.job)} times; give A and B")
    if args.window <= 0 or args.rounds < 1 or args.warm_steps < 1:
        parser.error("--window must be above 0, --rounds and --warm-steps at least 1")
    if args.job[0][0] == args.job[1][0]:
        parser.error(f"--job: both write {args.job[0][0]}; give each a folder of its own")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    args = parse(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit("stopped"))
    with running(args.job) as jobs:
        start = time.monotonic()
        while any(job.num_steps() < args.warm_steps for job in jobs):
            if time.monotonic() - start > START_LIMIT_S:
                counts = [job.num_steps() for job in jobs]
                print(f"after {START_LIMIT_S:.0f} s the jobs made {counts} steps", file=sys.stderr)
                return 1
            time.sleep(1.0)
        alternate(jobs, args.window, args.rounds)
        print(report(jobs[0].turns, jobs[1].turns), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
