"""Compares what a replay wrote of its steps with what the run wrote of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_rl.config.outputs import CONFIG_FILE, METRICS_FILE, ROLLOUTS_FILE
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.metrics.equality import computed, row_differences
from mindspeed_rl.metrics.jsonl import read_jsonl
from mindspeed_rl.metrics.names import is_evaluation

MOST_TOLD = 5
# Chapters of metrics that are of the samples and the model, and not of the ranks they lie on.
_OF_ANY_LAYOUT = (
    *("reward/", "response/", "loss/", "policy/", "value/", "optimizer/", "mismatch/"),
    "correction/",
)

LAYOUT_FLAGS = (
    *("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"),
    *("--expert-model-parallel-size", "--expert-tensor-parallel-size"),
    *("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"),
    *("--rl-inference-tensor-model-parallel-size", "--rl-inference-expert-model-parallel-size"),
    "--rollout-dp",
)
"""Flags that say which ranks share a model, in training or in an engine."""


def trained_steps(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the metrics of every training step of a run, by step; evaluations are left out."""
    return {
        row["step"]: row
        for row in read_jsonl(folder / METRICS_FILE)
        if not any(is_evaluation(name) for name in row)
    }


def require_step(folder: Path, step: int) -> None:
    """Check that a folder has the results of a step.

    Raises:
        UsageError: It is no run, or one that has not come to the step.
    """
    typed = f"--replay {step} {folder}"
    if not (folder / METRICS_FILE).is_file():
        raise UsageError(
            f"{typed}: the folder has no {METRICS_FILE}, so it is not the --output-dir of a run; "
            "name that folder"
        )
    steps = trained_steps(folder)
    if step not in steps:
        known = f"the steps {min(steps)} to {max(steps)}" if steps else "no finished step"
        raise UsageError(f"{typed}: the run has {known}; give a step that it has done")


def began_alike(folder: Path, num_ranks: int, flags: Mapping[str, Any]) -> bool:
    """Whether a run began on as many ranks with the same sizes of layouts, as far as it is known.

    Args:
        folder: The ``--output-dir`` of the run.
        num_ranks: Number of ranks of the replay.
        flags: Its flags, as a run writes them.
    """
    config = folder / CONFIG_FILE
    resumed = folder.glob(f"{config.stem}-until-step-*{config.suffix}")
    begins = sorted(resumed, key=lambda path: (len(path.stem), path.stem))  # by number
    try:
        record = json.loads((begins[0] if begins else config).read_text(encoding="utf-8"))
        theirs, ranks = record["flags"], record["machine"]["ranks"]
        sizes = {name: theirs[name] for name in LAYOUT_FLAGS}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return True
    return bool(ranks == num_ranks and all(flags[name] == size for name, size in sizes.items()))


def comparable_metrics(row: Mapping[str, Any], *, any_layout: bool) -> dict[str, Any]:
    """Return the metrics of a step that a replay has to repeat.

    Args:
        row: Metrics of a step.
        any_layout: Whether the layouts differ, so that only what is the same in any counts.
    """
    found = computed(row)
    if any_layout:
        return {name: value for name, value in found.items() if name.startswith(_OF_ANY_LAYOUT)}
    return found


def metric_lines(mine: Mapping[str, Any], other: Mapping[str, Any], tolerance: float) -> list[str]:
    """Return a line for each of the first metrics that differ, and one for how many there are."""
    found = list(row_differences(mine, other, tolerance))
    lines = [f"{name}: {a!r} instead of {b!r}" for name, a, b in found[:MOST_TOLD]]
    if len(found) > MOST_TOLD:
        lines.append(f"{len(found)} metrics of {len(mine.keys() | other.keys())} differ")
    return lines


def dumped_rollouts(folder: Path, step: int) -> dict[int, dict[str, Any]]:
    """Return the rollouts of a step that a run has written, by sample."""
    return {
        row["sample_id"]: row for row in read_jsonl(folder / ROLLOUTS_FILE) if row["step"] == step
    }


def rollout_lines(
    mine: Mapping[int, Mapping[str, Any]], other: Mapping[int, Mapping[str, Any]], tolerance: float
) -> list[str]:
    """Return a line for the first difference of every sample that both have written."""
    lines = []
    for sample in sorted(mine.keys() & other.keys()):
        if first := next(_fields_that_differ(mine[sample], other[sample], tolerance), None):
            lines.append(f"sample {sample}, {first}")
    return lines


# In the order in which they come to be; ids say more than the text that is made of them.
_FIELDS = ("prompt_ids", "prompt", "response_ids", "logprobs", "response", "reward", "parts")


def _fields_that_differ(
    mine: Mapping[str, Any], other: Mapping[str, Any], tolerance: float
) -> Iterator[str]:
    for name in _FIELDS:
        if name not in mine or name not in other:
            continue
        a, b = mine[name], other[name]
        if isinstance(a, list) and isinstance(b, list):
            yield from _place_that_differs(name, a, b, tolerance)
        elif list(row_differences({"": a}, {"": b}, tolerance)):
            yield f"{name}: {a!r} instead of {b!r}"


def _place_that_differs(
    name: str, mine: Sequence[Any], other: Sequence[Any], tolerance: float
) -> Iterator[str]:
    for place, (a, b) in enumerate(zip(mine, other, strict=False)):
        exact = 0.0 if isinstance(a, int) else tolerance
        if list(row_differences({"": a}, {"": b}, exact)):
            yield f"{name}, place {place}: {a!r} instead of {b!r}"
            return
    if len(mine) != len(other):
        yield f"{name}: {len(mine)} instead of {len(other)}"
