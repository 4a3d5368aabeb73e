"""Writes a jsonl file of verifiable tasks: digit sorting or arithmetic word problems."""

from __future__ import annotations

import argparse
import json
from typing import Any

from mindspeed_rl.data.rows import read_rows
from mindspeed_rl.data.tasks import TASK_NAMES, generate_task, write_jsonl


def prompts_of(path: str) -> set[str]:
    """The user messages of a file.

    Raises:
        ValueError: there is no such file, or a row of it is broken or has no prompt.
    """
    found = set()
    for row in read_rows(path):
        if "prompt" not in row.values:
            raise ValueError(f"{row.where}: no column 'prompt', only {sorted(row.values)}")
        found.add(json.dumps(row.values["prompt"]))
    return found


def make_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows to write, after a look at the files that may share no prompt with them.

    Raises:
        ValueError: naming the argument or the file at fault.
    """
    rows = list(generate_task(args.task, args.num_rows, args.seed, args.split))
    mine = {json.dumps(row["prompt"]) for row in rows}
    for other in args.disjoint_from:
        if common := mine & prompts_of(other):
            raise ValueError(f"{len(common)} prompts of {args.output} are also in {other}")
    return rows


def main() -> None:
    """Generate, check that the file shares no prompt with others, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=TASK_NAMES, default="digit_sort")
    parser.add_argument("--num-rows", type=int, required=True, help="Rows to write.")
    parser.add_argument("--split", choices=("train", "heldout"), default="train")
    parser.add_argument("--seed", type=int, default=0, help="Other seeds give other rows.")
    parser.add_argument("--output", required=True, help="File to write.")
    parser.add_argument(
        "--disjoint-from", nargs="*", default=[], help="Files that may share no prompt with it."
    )
    args = parser.parse_args()
    if args.num_rows < 1:
        parser.error(f"--num-rows {args.num_rows}: must be at least 1")
    try:
        rows = make_rows(args)
        count = write_jsonl(args.output, rows, num_rows=len(rows))
    except (ValueError, OSError) as error:  # OSError: --output cannot be written
        parser.error(str(error))
    print(f"{args.output}: {count} rows of {args.task} ({args.split})")


if __name__ == "__main__":
    main()
