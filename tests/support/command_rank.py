"""Body of a forked rank that is a command: ``python -m MODULE FLAGS`` as torchrun starts it.

Of the command only one thing differs: torch is imported already, so the environment is prepared
without the check that it is not.
"""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import sys
import time
from collections.abc import MutableMapping
from pathlib import Path

from mindspeed_rl.launch import bootstrap


def prepare_imported(
    platform: str,
    environ: MutableMapping[str, str],
    *,
    deterministic: bool = False,
    buffer_mb: int = 0,
    longest_phase_s: float = 0.0,
) -> list[str]:
    """As ``bootstrap.prepare_environment``, in a process that has imported torch."""
    assert platform == "cpu" and not deterministic and not buffer_mb
    bootstrap.set_defaults(platform, environ, longest_phase_s)
    if attempt := sys.modules.get("mindspeed_rl.launch.attempt"):
        attempt._IMPORTED_AT = time.time()  # type: ignore[attr-defined]  # its server imported it
    return []


def main() -> None:
    """Run the command of the folder that is the first argument."""
    command = json.loads((Path(sys.argv[1]) / "command.json").read_text())
    faulthandler.dump_traceback_later(command["timeout_s"], exit=True)
    bootstrap.prepare_environment = prepare_imported
    os.chdir(command["cwd"])
    sys.argv[1:] = command["flags"]
    runpy.run_module(command["module"], run_name="__main__", alter_sys=True)
