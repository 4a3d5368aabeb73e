"""Runs ``--rl-dry-run`` for an entry: predicts, prints and ends."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from mindspeed_rl.config import PretrainRunConfig, RLRunConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.planning.findings import find_out, world_size
from mindspeed_rl.planning.report import as_json, lines

FITS, DOES_NOT_FIT = 0, 3


def dry_run(
    config: RLRunConfig | PretrainRunConfig,
    environment: Mapping[str, str],
    notes: Sequence[str] = (),
) -> int:
    """Print the prediction of a run and return the exit code.

    Args:
        config: Configuration of the run.
        environment: Environment variables, which give the world size where no flag does.
        notes: Lines about the flags of the command line, printed before the prediction.

    Raises:
        UsageError: The flags are not possible.
    """
    world = world_size(config, environment)
    found = find_out(config, world)
    target = config.dry_run.rl_dry_run_json
    text = json.dumps(as_json(found) | {"flags": list(notes)}, indent=1)
    print(text if target == "-" else "\n".join([*notes, *lines(found)]), flush=True)
    if target not in ("", "-"):
        try:
            Path(target).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--rl-dry-run-json {target}: {error.strerror}") from error
    return FITS if found.fits else DOES_NOT_FIT
