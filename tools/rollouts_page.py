"""Writes the page of a run's responses: python tools/rollouts_page.py OUTPUT_DIR [--out HTML].

``mindspeed-rl rollouts`` is the same command.
"""

from __future__ import annotations

import sys

import needs_environment  # noqa: F401

from mindspeed_rl.metrics.rollouts_page import main

if __name__ == "__main__":
    sys.exit(main())
