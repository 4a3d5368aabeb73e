"""Plants named faults one after the other; each must turn its test red.

usage: python tests/faults/run.py [--list] [--only NAME ...] [--jobs N] [--proven] [--within S]

First every named test must pass without a fault, unless --proven says that all just have. Then
each fault is planted in a fork of a process that has imported torch and megatron-core, which takes
longer than most tests; it runs just the fault's test. Exit status 1 when a fault is not killed:

    killed         the test failed
    ALIVE          the test still passes
    never reached  the test ended without a call of what was replaced, so it proves nothing
    broken         the target does not exist, or the fault itself raised: mend its row
    hangs          the test was not finished within the limit
    left out       the seconds of --within were over before its turn, which is no failure
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from multiprocessing.context import ForkServerContext
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
if str(TESTS) not in sys.path:  # run as a script
    sys.path.insert(0, str(TESTS))

from support.warm_ranks import FEW_WORLDS  # noqa: E402

from faults.planting import FAULT, REPORT, TABLE, Fault, plant_from_environment  # noqa: E402

TIMEOUT_S = 120.0  # one fault
GREEN_TIMEOUT_S = 600.0  # all tests without a fault
_OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile", "planted")
# Nothing of mindspeed_rl or of the tests: a fault comes before them.
_LIBRARIES = [
    "pytest", "hypothesis", "numpy", "safetensors.torch", "torch.distributed", "transformers",
    "megatron.core.distributed", "megatron.core.optimizer", "megatron.core.models.gpt",
    "megatron.core.pipeline_parallel",
]  # fmt: skip


@cache
def _forks() -> ForkServerContext:
    """Processes that are forks of one which has imported the libraries."""
    os.environ.update(OMP_NUM_THREADS="1", TORCH_COMPILE_DISABLE="1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_LIBRARIES)
    return context


def _pytest(arguments: Sequence[str], log: str, environment: Mapping[str, str]) -> None:
    """Body of a fork: plant the fault of the environment, run pytest, end with its status."""
    os.setsid()  # what a test starts ends with it
    os.chdir(ROOT)
    # processes that the test starts plant the same fault
    path = [str(TESTS / "faults" / "bootstrap"), str(ROOT)]
    os.environ.update(environment, PYTHONPATH=os.pathsep.join(path), **{FEW_WORLDS: "1"})
    sys.path[:0] = [*path, str(TESTS)]
    multiprocessing.set_start_method(None, force=True)  # the default, as in any other process
    descriptor = os.open(log, os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    status = 3  # pytest's own number for an internal error
    try:
        plant_from_environment()
        status = int(import_module("pytest").main(list(arguments)))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run_tests(
    tests: Sequence[str], timeout_s: float, environment: Mapping[str, str]
) -> tuple[int | None, str]:
    """Run node ids in a fork: pytest's status, ``None`` when it hangs, and what it printed."""
    with tempfile.NamedTemporaryFile(prefix="faults-") as log:
        arguments = ([*_OPTIONS, *tests], log.name, dict(environment))
        process = _forks().Process(target=_pytest, args=arguments)
        process.start()
        process.join(timeout_s)
        status = process.exitcode
        if status is None and process.pid:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
        return status, Path(log.name).read_text(errors="replace")


def check(fault: Fault, table: str) -> tuple[str, str]:
    """Plant one fault and run its test: the verdict, and what there is to say about it."""
    with tempfile.NamedTemporaryFile(prefix="faults-") as report:
        environment = {FAULT: fault.name, REPORT: report.name, TABLE: table}
        status, output = run_tests([fault.test], TIMEOUT_S, environment)
        lines = Path(report.name).read_text().splitlines()
    if broken := [line for line in lines if line.startswith("broken")]:
        return "broken", f"{broken[0]}\n{output[-2000:]}"
    if status is None:
        return "hangs", f"{fault.test} is not finished after {TIMEOUT_S:g} s"
    if status not in (0, 1):  # pytest: all passed, some failed
        return "broken", f"{fault.test} did not run:\n{output[-2000:]}"
    if "reached" not in lines:
        return "never reached", f"{fault.test} does not call {fault.target}"
    if status == 0:
        return "ALIVE", f"{fault.test} still passes: {fault.danger}"
    return "killed", ""


def timed_check(fault: Fault, table: str) -> tuple[str, str, float]:
    """As :func:`check`, and the seconds that it took."""
    start = time.perf_counter()
    verdict, why = check(fault, table)
    return verdict, why, time.perf_counter() - start


LEFT_OUT = "left out"


def checks(
    faults: Sequence[Fault], jobs: int, table: str, end: float
) -> Iterator[tuple[str, str, float]]:
    """Verdicts in the order of the faults; after ``end`` of the clock none is planted any more."""

    def check_in_time(fault: Fault) -> tuple[str, str, float]:
        if time.monotonic() > end:
            return LEFT_OUT, "", 0.0
        return timed_check(fault, table)

    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(check_in_time, faults)


def green(faults: Sequence[Fault], jobs: int) -> str:
    """What the named tests say that fail without a fault; empty when all pass."""
    files: dict[str, set[str]] = {}
    for fault in faults:
        files.setdefault(fault.test.partition("::")[0], set()).add(fault.test)
    groups: list[list[str]] = [[] for _ in range(min(jobs, len(files)))]
    for tests in sorted(files.values(), key=len, reverse=True):  # those of a file together
        min(groups, key=len).extend(sorted(tests))
    with ThreadPoolExecutor(jobs) as pool:
        ended = pool.map(lambda tests: run_tests(tests, GREEN_TIMEOUT_S, {}), groups)
        return "".join(output[-4000:] for status, output in ended if status != 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the table."""
    parser = argparse.ArgumentParser(prog="faults", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the faults and their tests")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these faults only")
    parser.add_argument("--jobs", type=int, default=2, help="forks at a time (default 2)")
    parser.add_argument("--proven", action="store_true", help="all tests have just passed")
    parser.add_argument(
        "--within", type=float, default=math.inf, metavar="S",
        help="begin with another one each day, and plant none after S seconds",
    )  # fmt: skip
    parser.add_argument("--table", default="faults.table", help="module with another FAULTS")
    options = parser.parse_args(arguments)
    known = {fault.name: fault for fault in import_module(options.table).FAULTS}
    if unknown := [name for name in options.only if name not in known]:
        parser.error(f"--only {' '.join(unknown)}: no such fault; see --list")
    faults: list[Fault] = [known[n] for n in options.only] or list(known.values())
    if options.list:
        for fault in faults:
            print(f"{fault.name}: {fault.target} -> {fault.test}\n    {fault.danger}")
        return 0
    start = time.monotonic()
    end = start + options.within
    counts: Counter[str] = Counter()
    planted = options.within > 0
    if planted and not options.proven and (problem := green(faults, options.jobs)):
        print(f"red without a fault:\n{problem}")
        return 1
    if math.isfinite(options.within):  # so that each has its turn where time is short
        first = int(time.time() // 86400) * 40 % len(faults)
        faults = faults[first:] + faults[:first]
    verdicts = checks(faults, options.jobs, options.table, end)
    for fault, (verdict, why, took) in zip(faults, verdicts, strict=True):
        counts[verdict] += 1
        print(f"{verdict}  {fault.name}  {took:.1f} s", flush=True)
        if why:
            print(f"        {why}", flush=True)
    seconds = time.monotonic() - start
    left_out = f", {counts[LEFT_OUT]} left out" if counts[LEFT_OUT] else ""
    print(f"{counts['killed']} of {len(faults)} faults killed in {seconds:.0f} s{left_out}")
    return 0 if counts["killed"] + counts[LEFT_OUT] == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
