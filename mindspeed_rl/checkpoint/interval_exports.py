"""Which Hugging Face checkpoints a run writes while it goes on, and which of them it keeps."""

from __future__ import annotations

import shutil
from pathlib import Path

from mindspeed_rl.config.outputs import refuse_foreign_adapters, refuse_foreign_target
from mindspeed_rl.config.training import CheckpointConfig
from mindspeed_rl.core.export_names import adapter_folder, interval_exports, interval_target


def due_target(options: CheckpointConfig, target: str | Path, step: int, last: int) -> Path | None:
    """Return where the model is to be written after ``step``; ``None``: it is not due. Pure.

    The last step has the export of ``--export-hf``.

    Args:
        options: Flags of checkpoints.
        target: Directory of the last export; empty: there is none.
        step: Number of the step that is done.
        last: Number of the last step of the run.
    """
    interval = options.export_hf_interval
    if not interval or not str(target) or step % interval or step >= last:
        return None
    return interval_target(target, step)


def keep_newest(target: str | Path, limit: int, step: int) -> list[int]:
    """Remove the exports of ``--export-hf-interval`` but the ``limit`` newest; on one rank.

    Args:
        target: Directory of the last export.
        limit: How many are kept; 0: all.
        step: Number of the present step: later exports are of a run that was taken back, and are
            written again.

    Returns:
        The steps whose exports were removed, in order.

    Raises:
        UsageError: One of them is no export of a run any more; nothing of it is removed.
    """
    if not limit:
        return []
    found = {at: path for at, path in interval_exports(target).items() if at <= step}
    gone = list(found)[:-limit]
    for at in gone:
        refuse_foreign_target(found[at], "--export-hf-limit")
        # Under another name first, so that a kill leaves no half of an export.
        hidden = found[at].with_name(f".{found[at].name}.gone")
        found[at].rename(hidden)
        shutil.rmtree(hidden)
        adapters = adapter_folder(found[at])
        if adapters.is_dir():
            refuse_foreign_adapters(adapters)
            shutil.rmtree(adapters)
    return gone
