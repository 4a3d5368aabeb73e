"""Compares the metrics of two runs, without what measures the machine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from mindspeed_rl.metrics.jsonl import NONFINITE

ABSENT = "absent"
"""Value of a metric that a row lacks."""
_OF_THE_MACHINE = ("time/", "time_max/", "throughput/", "memory/", "run/")
# Seconds decide how much is drafted, and nothing of what is sampled.
_OF_DRAFTS = ("rollout/draft_", "rollout/steps_per_token")


def measures_machine(name: str) -> bool:
    """Whether a metric measures the machine and not the computation.

    Two runs with the same numbers differ in such metrics alone: times, rates, memory, restarts, and
    how much was drafted. They are recognised by the prefix of the name, or by the unit at its end
    (``_s``, ``_ms``).
    """
    return name.startswith(_OF_THE_MACHINE + _OF_DRAFTS) or name.endswith(("_s", "_ms"))


def computed(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a row that do not depend on the clock or the process."""
    found = {name: value for name, value in row.items() if not measures_machine(name)}
    names = [name for name in found.pop(NONFINITE, ()) if not measures_machine(name)]
    return found | ({NONFINITE: names} if names else {})


def row_differences(
    mine: Mapping[str, Any], other: Mapping[str, Any], tolerance: float = 0.0
) -> Iterator[tuple[str, Any, Any]]:
    """Yield name and both values of the metrics in which two rows differ, in order of names.

    Args:
        mine: Metrics of a step, as read from metrics.jsonl.
        other: Those of another run; a name that one of them lacks has the value :data:`ABSENT`.
        tolerance: Largest |a - b| / max(1, |b|) that counts as equal; 0 compares bits, where NaN
            equals NaN.
    """
    for name in sorted(mine.keys() | other.keys()):
        a, b = mine.get(name, ABSENT), other.get(name, ABSENT)
        if not _equal(a, b, tolerance):
            yield name, a, b


def _equal(a: Any, b: Any, tolerance: float) -> bool:
    if repr(a) == repr(b):
        return True
    if not tolerance or not all(isinstance(x, int | float) and math.isfinite(x) for x in (a, b)):
        return False
    return bool(abs(a - b) <= tolerance * max(1.0, abs(b)))
