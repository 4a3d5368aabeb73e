"""Ends a tool that imports it with one line where this project's environment is not active."""

from __future__ import annotations

import sys
from importlib.util import find_spec

if find_spec("mindspeed_rl") is None:
    sys.exit(
        f"{sys.argv[0]}: {sys.executable} does not have the package mindspeed_rl; start with "
        "`source .venv/bin/activate`, or make the environment with pretrain_scripts/setup_env.sh"
    )
