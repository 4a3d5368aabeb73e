"""Plants named faults in a copy of the library; each must turn its test red.

usage: python tests/mutations.py [--list] [--only NAME ...] [--jobs N]

A test suite is worth what it catches. Every row is a fault that was made somewhere in the field
and trained silently on. The copy holds the package and the tests; one pytest process runs just the
named test. First every named test must pass on an unchanged copy. Exit status 1 when a fault
survives, a test is red without a fault, or the text to replace is not there exactly once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.faults import MUTATIONS, Mutation

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


def run_tests(folder: Path, tests: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run some node ids in a copy; the copy is the working directory, so it is what is imported."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )


def plant(mutation: Mutation, folder: Path) -> None:
    """Make the fault in a copy.

    Raises:
        ValueError: the text to replace is not there exactly once.
    """
    path = folder / "mindspeed_rl" / mutation.file
    text = path.read_text()
    if (count := text.count(mutation.old)) != 1:
        raise ValueError(
            f"{mutation.file} holds {mutation.old!r} {count} times, must be once; update the row "
            f"{mutation.name!r} of tests/support/faults.py"
        )
    path.write_text(text.replace(mutation.old, mutation.new))


def check(mutation: Mutation) -> str | None:
    """Plant one fault and run its test; what is wrong, or ``None`` when the test went red."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        folder = Path(name)
        copy_tree(folder)
        try:
            plant(mutation, folder)
            done = run_tests(folder, [mutation.test], TIMEOUT_S)
        except ValueError as error:
            return str(error)
        except subprocess.TimeoutExpired:
            return f"{mutation.test} hangs: not finished after {TIMEOUT_S:g} s"
    if done.returncode == TESTS_FAILED:
        return None
    if done.returncode == 0:
        return f"survived: {mutation.test} still passes"
    return f"{mutation.test} did not run (pytest status {done.returncode}):\n{done.stdout[-2000:]}"


def check_green(mutations: list[Mutation]) -> str | None:
    """The named tests must pass without a fault, else their red proves nothing."""
    tests = sorted({mutation.test for mutation in mutations})
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        copy_tree(Path(name))
        try:
            done = run_tests(Path(name), tests, GREEN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"without a fault the tests are not finished after {GREEN_TIMEOUT_S:g} s"
    return None if done.returncode == 0 else f"red without a fault:\n{done.stdout[-4000:]}"


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
    parser.add_argument("--jobs", type=int, default=2, help="copies tested at a time (default 2)")
    arguments = parser.parse_args()
    try:
        mutations = choose(arguments.only)
    except ValueError as error:
        parser.error(str(error))
    if arguments.list:
        for mutation in mutations:
            print(f"{mutation.name}: {mutation.file} -> {mutation.test}")
        return 0
    start = time.perf_counter()
    if problem := check_green(mutations):
        print(problem)
        return 1
    num_alive = 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for mutation, problem in zip(mutations, pool.map(check, mutations), strict=True):
            num_alive += problem is not None
            print(f"{'ALIVE' if problem else 'killed'}  {mutation.name}", flush=True)
            if problem:
                print(f"        {problem}")
    seconds = time.perf_counter() - start
    print(f"{len(mutations) - num_alive} of {len(mutations)} faults killed in {seconds:.0f} s")
    return 1 if num_alive else 0


if __name__ == "__main__":
    sys.exit(main())
