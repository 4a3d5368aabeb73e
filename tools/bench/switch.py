"""Times the switch between training and rollout on real engines, action by action.

    python tools/bench/switch.py                        # 2 ranks, 205 MB of bf16 weights, 2 minutes
    python tools/bench/switch.py --warm-cycles 200 --cycles 200 --num-layers 1  # does memory grow?

ours        the product's state machine: one persistent host region per owner, storages resized
sequential  the order and the way of the CANN recipe: the same steps, each tensor copied to freshly
            allocated host memory at every switch (without the second copy into pinned memory that
            the recipe makes on devices), one after another
copy        a plain copy of as many bytes as ours copies, into memory that is as warm or fresh;
            fresh pages once ordinary, once large, as ours asks the system for

The three alternate in one run; numbers are medians over the cycles of the slowest rank. The
engine's weights leave as well (--rollout-sleep all). The last line is RESULT and a JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="data-parallel ranks (2)")
    parser.add_argument("--num-layers", type=int, default=8, help="layers of 12.8 M weights (8)")
    parser.add_argument("--warm-cycles", type=int, default=3, help="untimed switches before (3)")
    parser.add_argument("--cycles", type=int, default=7, help="timed switches of each way (7)")
    parser.add_argument("--kv-cache-gb", type=float, default=0.25, help="GiB per rank (0.25)")
    parser.add_argument("--model", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name in ("ranks", "num_layers", "cycles", "warm_cycles"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    return args


def launch(args: argparse.Namespace) -> int:
    """Write the model, start the ranks with torchrun, wait."""
    from make_tiny_model import write_tiny_model

    with tempfile.TemporaryDirectory(prefix="switch-bench-") as folder:
        print("writing a model with random weights", file=sys.stderr, flush=True)
        model = write_tiny_model(
            Path(folder) / "model",
            hidden_size=1024,
            num_layers=args.num_layers,
            num_heads=16,
            num_kv_heads=16,
            ffn=2816,
        )
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(args.ranks), __file__, *sys.argv[1:], "--model", str(model)),
        ]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(
                [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
            ),
        }
        return subprocess.run(command, env=environment, check=False).returncode


def main() -> int:
    """Start the ranks, or be one of them."""
    args = parse()
    if not args.model:
        return launch(args)
    from bench.switch_rank import race

    record = race(args)
    if record is not None:
        print("RESULT " + json.dumps({"bench": "switch", **record}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
