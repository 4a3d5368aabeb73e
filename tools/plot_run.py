"""Draws a run, finished or not: python tools/plot_run.py OUTPUT_DIR [--out PNG] [--report HTML]."""

from __future__ import annotations

import argparse
from pathlib import Path

from mindspeed_rl.observability.curves import plot_run
from mindspeed_rl.observability.html_report import write_report


def main() -> None:
    """Parses the command line, writes the picture and the page."""
    parser = argparse.ArgumentParser(description="Draw the curves of a training run.")
    parser.add_argument("output_dir", type=Path, help="folder that holds metrics.jsonl")
    parser.add_argument(
        "--out", type=Path, default=None, help="picture to write (OUTPUT_DIR/curves.png)"
    )
    parser.add_argument(
        "--report", type=Path, default=None, help="page to write (OUTPUT_DIR/report.html)"
    )
    args = parser.parse_args()
    out = args.out or args.output_dir / "curves.png"
    report = args.report or args.output_dir / "report.html"
    try:
        plot_run(args.output_dir / "metrics.jsonl", out)
        write_report(args.output_dir, report)
    except ValueError as error:
        parser.error(str(error))
    print(f"wrote {out} and {report}")


if __name__ == "__main__":
    main()
