"""Plants named faults one after the other; each must turn its test red.

usage: python -m faults [--list] [--only NAME ...] [--jobs N], with PYTHONPATH=tests, or
       python tests/faults/run.py ...

First every named test must pass without a fault. Then each fault is planted in a fork of a process
that has imported torch and megatron-core (support/warm_pytest.py), which runs just its test.
Exit status 1 when a fault is not killed:

    killed         the test failed
    ALIVE          the test still passes
    never reached  the test ended without a call of what was replaced, so it proves nothing
    broken         the target does not exist, or the fault itself raised: mend its row
    hangs          the test was not finished within the limit
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
if str(TESTS) not in sys.path:  # run as a script
    sys.path.insert(0, str(TESTS))

from faults.planting import FAULT, REPORT, TABLE, Fault  # noqa: E402

TIMEOUT_S = 120.0  # one fault
GREEN_TIMEOUT_S = 600.0  # all tests without a fault
_OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0")


@dataclass(frozen=True, slots=True)
class Ended:
    """Exit status of pytest, or ``hangs``, and what it printed."""

    status: str
    output: str


class Runners:
    """Processes that run pytest in forks; one task each at a time. A context that ends them."""

    def __init__(self, count: int) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
        script = str(TESTS / "support" / "warm_pytest.py")
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", script],
                env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for _ in range(count)
        ]  # fmt: skip
        self._free: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
        for process in self._processes:
            self._free.put(process)

    def __enter__(self) -> Runners:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def run(self, tests: Sequence[str], timeout_s: float, environment: Mapping[str, str]) -> Ended:
        """Run some node ids in a fork with this environment."""
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            log = Path(folder) / "log"
            task = {"folder": str(ROOT), "arguments": [*_OPTIONS, *tests], "log": str(log),
                    "timeout_s": timeout_s, "environment": dict(environment)}  # fmt: skip
            process = self._free.get()
            try:
                assert process.stdin is not None and process.stdout is not None
                print(json.dumps(task), file=process.stdin, flush=True)
                status = process.stdout.readline().strip()
            finally:
                self._free.put(process)
            return Ended(status, log.read_text(errors="replace") if log.is_file() else "")


def check(fault: Fault, runners: Runners, table: str) -> tuple[str, str]:
    """Plant one fault and run its test: the verdict, and what there is to say about it."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        report = Path(folder) / "report"
        environment = {FAULT: fault.name, REPORT: str(report), TABLE: table}
        done = runners.run([fault.test], TIMEOUT_S, environment)
        lines = report.read_text().splitlines() if report.is_file() else []
    if broken := [line for line in lines if line.startswith("broken")]:
        return "broken", f"{broken[0]}\n{done.output[-2000:]}"
    if done.status == "hangs":
        return "hangs", f"{fault.test} is not finished after {TIMEOUT_S:g} s"
    if done.status not in ("0", "1"):  # pytest: all passed, some failed
        return "broken", f"{fault.test} did not run:\n{done.output[-2000:]}"
    if "reached" not in lines:
        return "never reached", f"{fault.test} does not call {fault.target}"
    if done.status == "0":
        return "ALIVE", f"{fault.test} still passes: {fault.danger}"
    return "killed", ""


def green(faults: Sequence[Fault], runners: Runners, jobs: int) -> str:
    """What the named tests say that fail without a fault; empty when all pass."""
    files: dict[str, set[str]] = {}
    for fault in faults:
        files.setdefault(fault.test.partition("::")[0], set()).add(fault.test)
    groups: list[list[str]] = [[] for _ in range(jobs)]
    for tests in sorted(files.values(), key=len, reverse=True):  # those of a file together
        min(groups, key=len).extend(sorted(tests))
    with ThreadPoolExecutor(jobs) as pool:
        several = [group for group in groups if group]
        ended = pool.map(lambda tests: runners.run(tests, GREEN_TIMEOUT_S, {}), several)
        return "".join(done.output[-4000:] for done in ended if done.status != "0")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the table."""
    parser = argparse.ArgumentParser(prog="faults", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the faults and their tests")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these faults only")
    parser.add_argument("--jobs", type=int, default=2, help="forks at a time (default 2)")
    parser.add_argument("--table", default="faults.table", help="module with another FAULTS")
    parser.add_argument("--no-green", action="store_true", help="leave the run without faults out")
    options = parser.parse_args(arguments)
    known = {fault.name: fault for fault in import_module(options.table).FAULTS}
    if unknown := [name for name in options.only if name not in known]:
        parser.error(f"--only {' '.join(unknown)}: no such fault; see --list")
    faults: list[Fault] = [known[n] for n in options.only] or list(known.values())
    if options.list:
        for fault in faults:
            print(f"{fault.name}: {fault.target} -> {fault.test}\n    {fault.danger}")
        return 0
    start = time.perf_counter()
    with Runners(options.jobs) as runners, ThreadPoolExecutor(options.jobs) as pool:
        if not options.no_green and (problem := green(faults, runners, options.jobs)):
            print(f"red without a fault:\n{problem}")
            return 1
        counts: Counter[str] = Counter()
        verdicts = pool.map(lambda fault: check(fault, runners, options.table), faults)
        for fault, (verdict, why) in zip(faults, verdicts, strict=True):
            counts[verdict] += 1
            print(f"{verdict}  {fault.name}" + (f"\n        {why}" if why else ""), flush=True)
    seconds = time.perf_counter() - start
    print(f"{counts['killed']} of {len(faults)} faults killed in {seconds:.0f} s")
    return 0 if counts["killed"] == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
