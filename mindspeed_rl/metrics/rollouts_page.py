"""Writes ``rollouts.html``: the responses that a run kept, to filter and read in a browser.

The page is one file without links, needs no server, and has its data inside. Its size is bounded:
of runs that kept more, steps are left out at even distances, and long texts are cut.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_rl.config.outputs import (
    CONFIG_FILE,
    EVALUATIONS_FILE,
    PAGE_FILE,
    ROLLOUTS_FILE,
)
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.files import write_text_atomic
from mindspeed_rl.metrics.jsonl import read_jsonl

MOST_BYTES = 16 << 20
"""Size of the data in a page, about."""
MOST_CHARACTERS = 20_000
"""Characters of a text of one response."""
_DATA = "/*DATA*/"
# Rows of --log-rollout-tokens have more, which nobody reads in a browser.
_SHOWN = frozenset(
    {
        *("step", "set", "kind", "sample_id", "group", "reward", "parts", "advantage", "answer"),
        *("prompt", "prompt_text", "response", "turns", "length", "finish_reason", "pieces"),
        *("mismatch", "read"),
    }
)


def write_page(output_dir: str | Path, target: str | Path | None = None) -> Path:
    """Write the page of a run, finished or not. Local.

    Args:
        output_dir: Folder of the run.
        target: File to write; ``None``: ``rollouts.html`` in that folder.

    Returns:
        The file that was written.

    Raises:
        UsageError: A file of the run is broken.
    """
    folder = Path(output_dir)
    path = Path(target) if target is not None else folder / PAGE_FILE
    title, about = _description(folder)
    rows, count = _bounded(folder, MOST_BYTES)
    if len(rows) < count:
        about += f"; {len(rows)} of {count} responses are in this page, those of some steps"
    data = {"title": title, "about": about, "rows": rows}
    # Escaped, so that no text of a response can end the script element.
    text = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    begin, end = template.split(_DATA)
    # A file may hold half of a surrogate pair, which is no UTF-8.
    whole = (begin + text + end).encode("utf-8", "replace").decode("utf-8")
    write_text_atomic(path, whole)
    return path


def _description(folder: Path) -> tuple[str, str]:
    """Return title and subtitle, from the record of the run where there is one."""
    try:
        record = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        flags = record["flags"]
        model = "/".join(Path(str(flags["--hf-checkpoint"])).parts[-2:])
        title = f"{model}, {flags['--rl-advantage-estimator']}: rollouts"
        return title, f"{folder.resolve()}, started {record['started']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return f"{folder.resolve().name}: rollouts", str(folder.resolve())


def _records(folder: Path) -> Iterator[dict[str, Any]]:
    for name in (ROLLOUTS_FILE, EVALUATIONS_FILE):
        yield from read_jsonl(folder / name)


def _bounded(folder: Path, most_bytes: int) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of a page, and how many there are in all; files are read twice."""
    sizes: dict[int, int] = {}
    count = 0
    for record in _records(folder):
        count += 1
        size = len(json.dumps(_shown(record), ensure_ascii=False).encode("utf-8", "replace"))
        sizes[record["step"]] = sizes.get(record["step"], 0) + size
    kept = kept_steps(sizes, most_bytes)
    return [_shown(r) for r in _records(folder) if r["step"] in kept], count


def kept_steps(sizes: Mapping[int, int], most_bytes: int) -> frozenset[int]:
    """Return the steps whose rows are shown: all, or every n-th from the last one. Pure.

    Args:
        sizes: Bytes of the rows of each step.
        most_bytes: Bytes of all that are shown; only the last step may have more.
    """
    steps = sorted(sizes, reverse=True)
    for stride in range(1, len(steps) + 1):
        kept = steps[::stride]
        if sum(sizes[step] for step in kept) <= most_bytes:
            return frozenset(kept)
    return frozenset(steps[:1])


def _shown(record: Mapping[str, Any]) -> dict[str, Any]:
    row = {name: _cut(value) for name, value in record.items() if name in _SHOWN}
    if "turns" in row:
        row["turns"] = [{**turn, "text": _cut(turn["text"])} for turn in row["turns"]]
    return row


def _cut(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MOST_CHARACTERS:
        return f"{value[:MOST_CHARACTERS]} [... {len(value) - MOST_CHARACTERS} characters more]"
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page that a command line asks for; return 2 for a mistake of the user."""
    parser = argparse.ArgumentParser(
        description="Write one HTML file with the responses that a run kept, finished or not."
    )
    parser.add_argument("output_dir", type=Path, help="folder that holds rollouts.jsonl")
    parser.add_argument(
        "--out", type=Path, default=None, help="file to write (OUTPUT_DIR/rollouts.html)"
    )
    given = parser.parse_args(argv)
    try:
        if not given.output_dir.is_dir():
            raise UsageError(f"{given.output_dir}: no such folder; give the --output-dir of a run")
        print(f"wrote {write_page(given.output_dir, given.out)}")
    except (UsageError, OSError) as error:
        print(f"rollouts_page: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
