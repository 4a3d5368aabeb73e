"""Make --prompt-data of a downloaded file of a published data set.

usage: python tools/prepare_data.py --dataset gsm8k|deepscaler|dapo-math-17k --input FILE
                                    --output DIR [--heldout N]

Download the file yourself (nothing here reaches the network):
  gsm8k           openai/gsm8k: main/train-00000-of-00001.parquet, or train.jsonl
  deepscaler      agentica-org/DeepScaleR-Preview-Dataset: deepscaler.json
  dapo-math-17k   BytedTsinghua-SIA/DAPO-Math-17k: data/dapo-math-17k.parquet

Writes DIR/train.jsonl, and with --heldout DIR/heldout.jsonl. Repeated questions are left out (the
file of dapo-math-17k holds each about a hundred times), and those with several answers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_rl.data.published import PUBLISHED, prepare
from mindspeed_rl.observability.files import write_text_atomic


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files; 2 for a mistake of the user."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", required=True, choices=sorted(PUBLISHED))
    parser.add_argument("--input", required=True, type=Path)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--heldout", type=int, default=0, help="questions to hold out (default 0)")
    given = parser.parse_args(argv)
    try:
        prepared = prepare(given.dataset, given.input, given.heldout)
    except ValueError as error:
        print(f"prepare_data: {error}", file=sys.stderr)
        return 2
    write(given.output / "train.jsonl", prepared.train)
    if given.heldout:
        write(given.output / "heldout.jsonl", prepared.heldout)
    print(
        f"{given.input}: {prepared.num_read} rows, {prepared.num_repeated} repeated, "
        f"{prepared.num_contradicting} questions with several answers left out; "
        f"{len(prepared.train)} to train on, {len(prepared.heldout)} held out in {given.output}"
    )
    return 0


def write(target: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """One JSON object a line."""
    write_text_atomic(target, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
