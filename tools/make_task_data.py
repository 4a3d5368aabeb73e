"""Writes a jsonl file of verifiable tasks: digit sorting or arithmetic word problems."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from mindspeed_rl.data.tasks import TASK_NAMES, generate_task, write_jsonl


def prompts_of(path: str) -> set[str]:
    """The user messages of a file."""
    with open(path) as lines:
        return {json.dumps(json.loads(line)["prompt"]) for line in lines}


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
    rows = list(generate_task(args.task, args.num_rows, args.seed, args.split))
    mine = {json.dumps(row["prompt"]) for row in rows}
    for other in args.disjoint_from:
        if common := mine & prompts_of(other):
            sys.exit(f"{len(common)} prompts of {args.output} are also in {other}")
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    count = write_jsonl(args.output, rows, num_rows=len(rows))
    print(f"{args.output}: {count} rows of {args.task} ({args.split})")


if __name__ == "__main__":
    main()
