"""Plants named faults in a copy of the library; each must turn its test red.

usage: python tests/mutations.py [--list] [--only NAME ...] [--jobs N]

A test suite is worth what it catches. Every row is a fault that was made somewhere in the field
and trained silently on. The copy holds the package and the tests; one pytest process runs just the
named test. First every named test must pass on an unchanged copy. Exit status 1 when a fault
survives, a test is red without a fault, or the text to replace is not there exactly once.
Processes are forks of one that has imported torch and megatron-core (support/warm_pytest.py).
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.faults import MUTATIONS, Mutation
from support.share import parse_share

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 120.0  # one fault
GREEN_TIMEOUT_S = 600.0  # all tests without a fault
TESTS_FAILED = 1  # pytest: collected, ran, and some failed


def copy_tree(target: Path) -> None:
    """The package, the tests and the pytest settings, so that nothing outside is imported."""
    ignore = shutil.ignore_patterns("__pycache__", ".*cache", ".hypothesis")
    for name in ("mindspeed_rl", "tests"):
        shutil.copytree(ROOT / name, target / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", target)


@dataclass(frozen=True, slots=True)
class Ended:
    """Exit status of pytest, ``None`` when it hung, and what it printed."""

    status: int | None
    output: str


class Runners:
    """Processes that run pytest in forks; one task each at a time. A context that ends them."""

    def __init__(self, count: int) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
        environment.pop("PYTHONPATH", None)
        script = str(ROOT / "tests" / "support" / "warm_pytest.py")
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

    @contextmanager
    def _runner(self) -> Iterator[subprocess.Popen[str]]:
        process = self._free.get()
        try:
            yield process
        finally:
            self._free.put(process)

    def run(self, folder: Path, tests: list[str], timeout_s: float) -> Ended:
        """Run some node ids in a copy; it is the working directory, so it is what is imported."""
        options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
        log = folder / "pytest.log"
        task = {"folder": str(folder), "arguments": [*options, *tests], "log": str(log),
                "timeout_s": timeout_s}  # fmt: skip
        with self._runner() as process:
            assert process.stdin is not None and process.stdout is not None
            print(json.dumps(task), file=process.stdin, flush=True)
            answer = process.stdout.readline().strip()
        output = log.read_text(errors="replace") if log.is_file() else ""
        return Ended(None if answer == "hangs" else int(answer), output)


def planted_text(mutation: Mutation, folder: Path) -> str:
    """The file of a tree with the fault in it.

    Raises:
        ValueError: the text to replace is not there exactly once.
    """
    text = (folder / "mindspeed_rl" / mutation.file).read_text()
    if (count := text.count(mutation.old)) != 1:
        raise ValueError(
            f"{mutation.file} holds {mutation.old!r} {count} times, must be once; update the row "
            f"{mutation.name!r} of tests/support/faults.py"
        )
    return text.replace(mutation.old, mutation.new)


def check(mutation: Mutation, runners: Runners) -> str | None:
    """Plant one fault and run its test; what is wrong, or ``None`` when the test went red."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        folder = Path(name)
        copy_tree(folder)
        (folder / "mindspeed_rl" / mutation.file).write_text(planted_text(mutation, folder))
        done = runners.run(folder, [mutation.test], TIMEOUT_S)
    if done.status is None:
        return f"{mutation.test} hangs: not finished after {TIMEOUT_S:g} s"
    if done.status == TESTS_FAILED:
        return None
    if done.status == 0:
        return f"survived: {mutation.test} still passes"
    return f"{mutation.test} did not run (pytest status {done.status}):\n{done.output[-2000:]}"


def shares(mutations: list[Mutation], count: int) -> list[list[str]]:
    """The tests of some faults in up to ``count`` groups, those of a file together."""
    files: dict[str, set[str]] = {}
    for mutation in mutations:
        files.setdefault(mutation.test.partition("::")[0], set()).add(mutation.test)
    groups: list[list[str]] = [[] for _ in range(count)]
    for tests in sorted(files.values(), key=len, reverse=True):
        min(groups, key=len).extend(sorted(tests))
    return [group for group in groups if group]


def check_green(tests: list[str], runners: Runners) -> str | None:
    """The named tests must pass without a fault, else their red proves nothing."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        copy_tree(Path(name))
        done = runners.run(Path(name), tests, GREEN_TIMEOUT_S)
    if done.status is None:
        return f"without a fault the tests are not finished after {GREEN_TIMEOUT_S:g} s"
    return None if done.status == 0 else f"red without a fault:\n{done.output[-4000:]}"


def choose(names: list[str]) -> list[Mutation]:
    """The rows of some names; all without names."""
    known = {mutation.name: mutation for mutation in MUTATIONS}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--only {' '.join(unknown)}: no such fault; see --list")
    return [known[name] for name in names] or list(MUTATIONS)


def main() -> int:
    """Run the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the faults and their tests")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these faults only")
    parser.add_argument(
        "--share", default="0/1", metavar="I/N", help="every N-th fault from the I-th on (0/1: all)"
    )
    parser.add_argument("--jobs", type=int, default=2, help="copies tested at a time (default 2)")
    arguments = parser.parse_args()
    try:
        mutations = parse_share("--share", arguments.share).of(choose(arguments.only))
        if arguments.list:
            for mutation in mutations:
                print(f"{mutation.name}: {mutation.file} -> {mutation.test}")
            return 0
        for mutation in mutations:
            planted_text(mutation, ROOT)
    except ValueError as error:
        parser.error(str(error))
    start = time.perf_counter()
    num_alive = 0
    with Runners(arguments.jobs) as runners, ThreadPoolExecutor(arguments.jobs) as pool:
        groups = shares(mutations, arguments.jobs)
        print(f"first {sum(map(len, groups))} tests without a fault (a minute or two)", flush=True)
        for problem in pool.map(lambda tests: check_green(tests, runners), groups):
            if problem:
                print(problem)
                return 1
        found = pool.map(lambda mutation: check(mutation, runners), mutations)
        for mutation, problem in zip(mutations, found, strict=True):
            num_alive += problem is not None
            print(f"{'ALIVE' if problem else 'killed'}  {mutation.name}", flush=True)
            if problem:
                print(f"        {problem}")
    seconds = time.perf_counter() - start
    print(f"{len(mutations) - num_alive} of {len(mutations)} faults killed in {seconds:.0f} s")
    return 1 if num_alive else 0


if __name__ == "__main__":
    sys.exit(main())
