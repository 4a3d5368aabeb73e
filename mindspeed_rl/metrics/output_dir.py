"""Cleans ``--output-dir`` of earlier results, so that it holds the results of one run alone."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from mindspeed_rl.config.outputs import (
    CURVES_FILE,
    PAGE_FILE,
    SUMMARY_FILE,
    earlier_results,
    refuse_earlier_results,
    refuse_foreign_target,
)
from mindspeed_rl.config.training import LoggingConfig

# Files that are written at the end of a run.
_OF_THE_END = (SUMMARY_FILE, CURVES_FILE, PAGE_FILE)


def take_output_dir(logging: LoggingConfig, load: str, local_rank: int, start: int) -> None:
    """Remove files from ``--output-dir`` that would pass as results of this run. Collective: world.

    A fresh run (``start`` 0) removes the results of an earlier one if it is allowed to; a resumed
    run removes the summary and the curves of its earlier end alone. Every node cleans the folder
    that it sees.

    Args:
        logging: Configuration of the folder, and whether earlier results may be removed.
        load: Value of ``--load``.
        local_rank: Rank of this process on its node.
        start: Number of steps that are done.

    Raises:
        UsageError: A fresh run found results and ``--overwrite-output-dir`` is not given.
    """
    if local_rank == 0:
        if start == 0:
            refuse_earlier_results(logging, load)
        found = earlier_results(logging.output_dir)
        remove([p for p in found if start == 0 or p.name in _OF_THE_END])
    dist.barrier()


def remove(results: list[Path]) -> None:
    """Remove files and exports, even if another node does so in a shared folder at the time."""
    for path in results:
        if not path.is_dir():
            path.unlink(missing_ok=True)
            continue
        refuse_foreign_target(path)
        gone = path.with_name(f".{path.name}.gone{os.getpid()}")
        with suppress(FileNotFoundError):  # another node removed it
            os.rename(path, gone)
            shutil.rmtree(gone)
