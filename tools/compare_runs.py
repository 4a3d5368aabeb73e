"""Compares two RL runs bit for bit: python tools/compare_runs.py OUTPUT_DIR OUTPUT_DIR.

It compares the metrics of all steps, except times, throughputs and memory, and the bytes of the
exported models. Exit code 0: the runs are the same; 1: they differ, and the differences are
printed; 2: a folder does not hold a run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import needs_environment  # noqa: F401

from mindspeed_rl.metrics.equality import computed, row_differences

MOST_TOLD = 20


def metrics(output: Path) -> list[dict[str, Any]]:
    """Return metrics that do not depend on the clock or the process."""
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [computed(json.loads(line)) for line in lines]


def digests(exported: Path) -> dict[str, str]:
    """Return the SHA-256 of every file with weights."""
    found = {}
    for file in sorted(exported.glob("*.safetensors")):
        with file.open("rb") as stream:
            found[file.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return found


def differences(first: Path, second: Path) -> Iterator[str]:
    """Yield the differences of two runs, one line each."""
    rows = [metrics(output) for output in (first, second)]
    if len(rows[0]) != len(rows[1]):
        yield f"metrics.jsonl: {len(rows[0])} rows and {len(rows[1])}"
    for number, (mine, other) in enumerate(zip(*rows, strict=False), 1):
        for name, a, b in row_differences(mine, other):
            yield f"metrics.jsonl:{number}: {name}: {a!r} and {b!r}"
    weights = [digests(output / "hf") for output in (first, second)]
    for name in sorted(weights[0].keys() | weights[1].keys()):
        if weights[0].get(name) != weights[1].get(name):
            yield f"hf/{name}: other bytes, or only in one"


def main() -> int:
    """Compare the runs and print the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("outputs", type=Path, nargs=2, metavar="OUTPUT_DIR")
    first, second = parser.parse_args().outputs
    for output in (first, second):
        if not (output / "metrics.jsonl").is_file() or not digests(output / "hf"):
            parser.error(f"{output}: no finished run: metrics.jsonl or hf/*.safetensors is missing")
    found = list(differences(first, second))
    for line in found[:MOST_TOLD]:
        print(line)
    if found:
        print(f"{len(found)} differences")
        return 1
    rows = metrics(first)
    print(
        f"the same bit for bit: {len(rows)} rows, {sum(map(len, rows))} values, "
        f"{len(digests(first / 'hf'))} files of weights"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
