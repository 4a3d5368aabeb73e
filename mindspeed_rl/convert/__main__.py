"""Converts checkpoints: Hugging Face to Megatron, back, and Megatron to Megatron.

Exit status: 0 success, 2 flags or files that cannot be converted, 1 an error of the disk.
"""

from __future__ import annotations

import sys

import torch

from mindspeed_rl.convert.command import run_conversion
from mindspeed_rl.convert.options import parse_options
from mindspeed_rl.convert.source import UnreadableError
from mindspeed_rl.core.errors import UsageError


def main() -> int:
    """Parse the flags and convert the checkpoint."""
    torch.set_num_threads(1)  # --workers are the threads
    try:
        run_conversion(parse_options(sys.argv[1:]), lambda line: print(line, flush=True))
    except (UsageError, UnreadableError) as error:
        print(f"convert_checkpoint: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"convert_checkpoint: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
