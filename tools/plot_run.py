"""Draws the curves of a run, finished or not: python tools/plot_run.py OUTPUT_DIR [--out PNG]."""

from __future__ import annotations

import argparse
from pathlib import Path

import needs_environment  # noqa: F401

from mindspeed_rl.metrics.curves import plot_run


def main() -> None:
    """Parse the command line and write the picture."""
    parser = argparse.ArgumentParser(description="Draw the curves of a training run.")
    parser.add_argument("output_dir", type=Path, help="folder that holds metrics.jsonl")
    parser.add_argument(
        "--out", type=Path, default=None, help="picture to write (OUTPUT_DIR/curves.png)"
    )
    args = parser.parse_args()
    out = args.out or args.output_dir / "curves.png"
    try:
        plot_run(args.output_dir / "metrics.jsonl", out)
    except ValueError as error:
        parser.error(str(error))
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
