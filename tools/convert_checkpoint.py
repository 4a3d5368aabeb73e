"""Converts checkpoints of other formats; the same as ``mindspeed-rl convert``."""

from __future__ import annotations

import sys

import needs_environment  # noqa: F401

from mindspeed_rl.convert.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
