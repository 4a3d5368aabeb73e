"""Runs ``--rl-dry-run`` for an entry: predicts, prints and ends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from mindspeed_rl.config import PretrainRunConfig, RLRunConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.planning.findings import find_out, world_size
from mindspeed_rl.planning.report import as_json, lines

FITS, DOES_NOT_FIT = 0, 3


def dry_run(
    config: RLRunConfig | PretrainRunConfig,
    environment: Mapping[str, str],
) -> int:
    """Print the prediction of a run and return the exit code.

    Args:
        config: Configuration of the run.
        environment: Environment variables, which give the world size where no flag does.

    Raises:
        UsageError: The flags are not possible.
    """
    world = world_size(config, environment)
    found = find_out(config, world)
    target, text = config.dry_run.rl_dry_run_json, json.dumps(as_json(found), indent=1)
    print(text if target == "-" else "\n".join(lines(found)), flush=True)
    if target not in ("", "-"):
        try:
            Path(target).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--rl-dry-run-json {target}: {error.strerror}") from error
    return FITS if found.fits else DOES_NOT_FIT
