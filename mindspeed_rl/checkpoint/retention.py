"""Which checkpoints of a run are kept: the newest ones, and the best by a metric.

``SAVE/best_checkpoint.json`` names the best one and has the values of all that are kept, so that a
resumed run still knows them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_rl.checkpoint.resume import checkpoint_path, complete_checkpoints, remove, step_of
from mindspeed_rl.config.training import CheckpointConfig
from mindspeed_rl.core.files import write_text_atomic

BEST = "best_checkpoint.json"


@dataclass(frozen=True, slots=True)
class Kept:
    """What `keep` did.

    Attributes:
        removed: Steps of the checkpoints that were removed.
        best: Step of the best checkpoint; ``None``: there is no metric or no value of it.
        missing: The name of the metric if no checkpoint has a value of it; else empty.
    """

    removed: tuple[int, ...] = ()
    best: int | None = None
    missing: str = ""

    @property
    def removed_line(self) -> str:
        """What to log of the checkpoints that were removed."""
        s, steps = "s" * (len(self.removed) > 1), ", ".join(map(str, self.removed))
        return f"removed the checkpoint{s} of step{s} {steps} (--save-total-limit)"


def best_step(steps: Iterable[int], scores: Mapping[int, float], *, largest: bool) -> int | None:
    """Return the step with the best score, the later one of equal ones.

    Args:
        steps: Steps that have a checkpoint.
        scores: Values by step; steps without one, and values that are not numbers, do not count.
        largest: Whether the largest value is the best.
    """
    sign = 1.0 if largest else -1.0
    known = [(sign * scores[s], s) for s in steps if s in scores and not math.isnan(scores[s])]
    return max(known)[1] if known else None


def removable(steps: Iterable[int], limit: int, best: int | None) -> list[int]:
    """Return the steps whose checkpoints go: all but the ``limit`` newest and the best.

    A limit of 0 keeps all.
    """
    ordered = sorted(steps)
    return [step for step in ordered[:-limit] if step != best] if limit else []


def keep(options: CheckpointConfig, scores: Mapping[int, float]) -> Kept:
    """Remove the checkpoints of ``--save`` that the flags do not keep; on one rank.

    A checkpoint that is being written is neither counted nor touched, and damaged ones do not
    count as kept.

    Args:
        options: Flags of checkpoints.
        scores: Values of ``--save-best-metric`` in this process, by step.
    """
    root = Path(options.save)
    if not (options.save_total_limit or options.save_best_metric) or not root.is_dir():
        return Kept()
    steps = [step_of(path) for path in complete_checkpoints(root)]
    best = None
    if metric := options.save_best_metric:
        known = {**_recorded(root, metric), **scores}
        scores = {step: known[step] for step in steps if step in known}
        best = best_step(steps, scores, largest=options.save_best_direction == "max")
    gone = removable(steps, options.save_total_limit, best)
    if best is not None:
        kept = {str(s): v for s, v in scores.items() if s not in gone and math.isfinite(v)}
        record = {
            "metric": options.save_best_metric,
            "direction": options.save_best_direction,
            "step": best,
            "value": scores[best] if math.isfinite(scores[best]) else str(scores[best]),
            "checkpoint": checkpoint_path(root, best).name,
            "values": kept,
        }
        write_text_atomic(root / BEST, json.dumps(record, indent=1, allow_nan=False) + "\n")
    for step in gone:
        remove(checkpoint_path(root, step))
    missing = options.save_best_metric if steps and best is None else ""
    return Kept(tuple(gone), best, missing)


def _recorded(root: str | os.PathLike[str], metric: str) -> dict[int, float]:
    """Return the values that an earlier process wrote; none if the file is broken."""
    try:
        record: dict[str, Any] = json.loads((Path(root) / BEST).read_text(encoding="utf-8"))
        values = record["values"] if record["metric"] == metric else {}
        return {int(step): float(value) for step, value in values.items()}
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ):
        return {}  # the values are a convenience: without them only the present ones count
